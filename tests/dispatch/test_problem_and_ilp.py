"""The assignment problem: the integer program against brute force, and what happens when a solver fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch import DispatchOptions, ilp
from dispatch.ilp import solve
from dispatch.problem import Problem, RequestClass, Slot, best_slots, greedy, is_feasible
from tridentserve.errors import ConfigError

OPTIONS = DispatchOptions(time_limit_s=30.0, gap=0.0)

slots = st.builds(Slot, pool=st.integers(0, 1), degree=st.sampled_from([1, 2, 4]))
values = st.dictionaries(slots, st.integers(1, 1000).map(lambda n: n / 4), max_size=4)
classes = st.builds(RequestClass, count=st.integers(1, 2), values=values)
idle = st.tuples(*[st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple)] * 2)
problems = st.builds(Problem, classes=st.lists(classes, max_size=3).map(tuple), idle=idle)


def can_place(degrees: list[int], nodes: tuple[int, ...]) -> bool:
    """Whether slots of these widths fit into nodes with so many idle workers, by trying everything."""
    if not degrees:
        return True
    return any(
        free >= degrees[0] and can_place(degrees[1:], (*nodes[:node], free - degrees[0], *nodes[node + 1 :]))
        for node, free in enumerate(nodes)
    )


def fits_by_trial(problem: Problem, chosen: list[Slot]) -> bool:
    return all(
        can_place([slot.degree for slot in chosen if slot.pool == pool], nodes)
        for pool, nodes in enumerate(problem.idle)
    )


def every_choice(problem: Problem) -> Iterator[list[tuple[float, Slot]]]:
    """All feasible assignments, one slot or none for each request."""
    options = [
        [None, *((value, slot) for slot, value in item.values.items())]
        for item in problem.classes
        for _ in range(item.count)
    ]
    for combination in product(*options):
        chosen = [pair for pair in combination if pair is not None]
        if fits_by_trial(problem, [slot for _, slot in chosen]):
            yield chosen


@settings(deadline=None, max_examples=150)
@given(problems)
def test_the_ilp_equals_brute_force(problem: Problem) -> None:
    best = max(sum(value for value, _ in chosen) for chosen in every_choice(problem))
    solution = solve(problem, OPTIONS)
    assert is_feasible(problem, solution.counts)
    assert solution.method in ("uncontended", "ranked", "ilp")
    assert solution.value(problem) == pytest.approx(best)
    assert solution.gap(problem) == pytest.approx(0.0, abs=1e-6)


@settings(deadline=None, max_examples=150)
@given(problems)
def test_what_is_required_is_served_at_the_least_loss(problem: Problem) -> None:
    """The first class that can be served alone is required; the rest is as good as it can be beside it."""
    firsts = [
        (index, replace(item, count=1, required=True))
        for index, item in enumerate(problem.classes)
        if any(problem.fits({slot: 1}) for slot in item.values)
    ]
    if not firsts:
        return
    index, first = firsts[0]
    rest = tuple(item for other, item in enumerate(problem.classes) if other != index)
    required = Problem((first, *rest), problem.idle)
    best = max(
        value + sum(each for each, _ in chosen)
        for slot, value in first.values.items()
        for chosen in every_choice(Problem(rest, problem.idle))
        if fits_by_trial(problem, [slot, *(each for _, each in chosen)])
    )
    solution = solve(required, OPTIONS)
    assert is_feasible(required, solution.counts)
    assert solution.method in ("uncontended", "ranked", "ilp")
    assert solution.value(required) == pytest.approx(best)
    assert is_feasible(required, greedy(required).counts)
    assert not is_feasible(required, {})


@settings(deadline=None)
@given(problems, st.lists(slots, max_size=6))
def test_nested_limits_are_exact(problem: Problem, chosen: list[Slot]) -> None:
    assert problem.fits(Counter(chosen)) == fits_by_trial(problem, chosen)


@settings(deadline=None)
@given(problems)
def test_a_greedy_plan_is_feasible_and_leaves_nothing_that_fits(problem: Problem) -> None:
    solution = greedy(problem)
    assert is_feasible(problem, solution.counts)
    taken: Counter[Slot] = Counter()
    for (_, slot), n in solution.counts.items():
        taken[slot] += n
    for index, item in enumerate(problem.classes):
        served = sum(n for (other, _), n in solution.counts.items() if other == index)
        if served < item.count:
            assert not any(problem.fits(taken + Counter([slot])) for slot in item.values)


def contended() -> Problem:
    """Three requests for two nodes of two: both kinds want width, and one wide slot does less than two narrow ones."""
    kinds = ({Slot(0, 2): 12.0, Slot(0, 1): 10.0}, {Slot(0, 2): 11.0, Slot(0, 1): 9.0})
    return Problem((RequestClass(2, kinds[0]), RequestClass(1, kinds[1])), ((2, 2),))


def test_the_solver_is_asked_only_where_requests_compete(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_solver(*settings: Any) -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr(ilp, "_solver", no_solver)
    alone = Problem(contended().classes[:1], ((2, 2),))
    assert solve(alone, OPTIONS) == best_slots(alone)
    assert solve(alone, OPTIONS).counts == {(0, Slot(0, 2)): 2}
    assert best_slots(contended()) is None


@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
def test_both_solvers_prove_the_optimum_in_silence(solver: Any, capfd: pytest.CaptureFixture[str]) -> None:
    solution = solve(contended(), DispatchOptions(solver=solver, time_limit_s=30.0, gap=0.0))
    assert (solution.method, solution.value(contended())) == ("ilp", 31.0)
    assert capfd.readouterr() == ("", "")


class Broken:
    """A solver that fails in a given way."""

    def __init__(self, how: str) -> None:
        self.how = how

    def actualSolve(self, model: Any) -> int:  # noqa: N802 (PuLP's name)
        if self.how == "raises":
            raise pulp.PulpSolverError("no binary")
        for variable in model.variables():
            variable.varValue = variable.upBound if self.how == "overbooks" else 0.0
        status = pulp.LpSolutionOptimal if self.how == "overbooks" else pulp.LpSolutionNoSolutionFound
        model.assignStatus(pulp.LpStatusOptimal, status)
        return int(pulp.LpStatusOptimal)


@pytest.mark.parametrize(
    ("how", "failure"),
    [
        ("raises", "PulpSolverError: no binary"),
        ("finds nothing", "no solution within 30.0 s"),
        ("overbooks", "the solver broke a limit"),
    ],
)
def test_a_solver_that_fails_is_replaced_by_the_greedy_plan(
    monkeypatch: pytest.MonkeyPatch, how: str, failure: str
) -> None:
    monkeypatch.setattr(ilp, "_solver", lambda *settings: Broken(how))
    solution = solve(contended(), OPTIONS)
    assert solution == greedy(contended(), failure)
    assert solution.method == "greedy"
    assert is_feasible(contended(), solution.counts)


def hard() -> Problem:
    """Many classes whose values differ a little, so that a proof takes longer than the limit below."""
    wide = [Slot(pool, k) for pool in (0, 1) for k in (1, 2, 4)]
    classes = [
        RequestClass(3, {slot: 1000 + (index * 37 + slot.pool * 11 + slot.degree * 5) % 101 / 7 for slot in wide})
        for index in range(120)
    ]
    return Problem(tuple(classes), ((7,) * 12, (5,) * 12))


def test_the_gap_that_is_told_is_proved_and_kept() -> None:
    """More than 100 requests compete, so that the first solution within the gap is taken."""
    best = solve(hard(), DispatchOptions(time_limit_s=30.0, gap=1e-6))
    loose = solve(hard(), DispatchOptions(time_limit_s=30.0, gap=0.01))
    assert best.method == loose.method == "ilp"
    assert loose.value(hard()) <= best.value(hard()) * (1 + 1e-6)
    assert best.value(hard()) <= loose.bound * (1 + 1e-9)
    assert loose.gap(hard()) <= 0.01
    assert best.gap(hard()) <= 1e-6


def test_a_time_limit_still_gives_a_feasible_plan() -> None:
    solution = solve(hard(), DispatchOptions(time_limit_s=0.001))
    assert solution.method in ("incumbent", "greedy")
    assert is_feasible(hard(), solution.counts)
    assert sum(solution.counts.values()) > 0


def test_an_incumbent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Broken):
        def actualSolve(self, model: Any) -> int:  # noqa: N802 (PuLP's name)
            for variable in model.variables():
                variable.varValue = 0.0
            model.variables()[0].varValue = 1.0  # the second fits too, and is added
            model.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)
            return int(pulp.LpStatusOptimal)

    monkeypatch.setattr(ilp, "_solver", lambda *settings: Stopped("stopped"))
    solution = solve(contended(), OPTIONS)
    assert (solution.method, sum(solution.counts.values())) == ("incumbent", 3)
    assert is_feasible(contended(), solution.counts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_efficiency": 0.0}, "min_efficiency is 0.0"),
        ({"max_degree": 0}, "max_degree is 0"),
        ({"handoff_reserve_bytes": -1}, "handoff_reserve_bytes is -1"),
        ({"solver": "Gurobi"}, "solver is 'Gurobi'; it must be HiGHS or CBC"),
        ({"time_limit_s": float("nan")}, "time_limit_s is nan"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"gap": 1.0}, "gap is 1.0"),
    ],
)
def test_bad_options_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DispatchOptions(**settings)
