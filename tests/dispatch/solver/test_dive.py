"""LPs whose fractions are made whole one after another, which spares large programs a search."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from dispatch import DispatchOptions
from dispatch.solver import ilp
from dispatch.solver.highs import FastHiGHS
from dispatch.solver.ilp import solve
from dispatch.solver.problem import Problem, is_feasible
from tests.dispatch.solver.test_problem_and_ilp import every_choice, problems, uneven


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few requests are searched at once; here they are treated as many are."""
    monkeypatch.setattr(ilp, "_SMALL", 0)


@settings(max_examples=150)
@given(problems)
def test_a_search_after_a_dive_finds_the_optimum(problem: Problem) -> None:
    """The dive has left all limits as they were."""
    best = max(sum(value for value, _ in chosen) for chosen in every_choice(problem))
    solution = solve(problem, DispatchOptions(time_limit_s=30.0, gap=1e-9))
    assert is_feasible(problem, solution.counts)
    assert solution.evaluate(problem) == pytest.approx(best)


@settings(max_examples=150)
@given(problems)
def test_the_gap_is_kept_and_the_bound_holds(problem: Problem) -> None:
    best = max(sum(value for value, _ in chosen) for chosen in every_choice(problem))
    solution = solve(problem, DispatchOptions(time_limit_s=30.0, gap=0.05))
    assert is_feasible(problem, solution.counts)
    assert solution.bound >= best - 1e-6
    assert solution.compute_gap(problem) <= 0.05 + 1e-6


def test_a_dive_spares_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounded LP is not close enough to the best plan."""

    def search(*arguments: Any) -> int:
        raise AssertionError("searched")

    monkeypatch.setattr(FastHiGHS, "actualSolve", search)
    solution = solve(uneven(), DispatchOptions(time_limit_s=30.0, gap=0.02))
    assert (solution.evaluate(uneven()), solution.found_by) == (34.0, "ilp")
