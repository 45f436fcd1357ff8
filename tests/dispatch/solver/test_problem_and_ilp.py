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

from dispatch import DispatchOptions
from dispatch.solver import ilp
from dispatch.solver.highs import FastHiGHS
from dispatch.solver.ilp import solve
from dispatch.solver.problem import GroupKind, Problem, RequestClass, choose_best_groups, is_feasible, plan_greedily

OPTIONS = DispatchOptions(time_limit_s=30.0, gap=0.0)

groups = st.builds(GroupKind, pool=st.integers(0, 1), degree=st.sampled_from([1, 2, 4]))
values = st.dictionaries(groups, st.integers(1, 1000).map(lambda n: n / 4), max_size=4)
classes = st.builds(RequestClass, count=st.integers(1, 2), values=values)
idle = st.tuples(*[st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple)] * 2)
problems = st.builds(Problem, classes=st.lists(classes, max_size=3).map(tuple), idle=idle)


def can_place(degrees: list[int], nodes: tuple[int, ...]) -> bool:
    """True when groups of these widths fit into nodes with these idle workers, by trying everything."""
    if not degrees:
        return True
    return any(
        free >= degrees[0] and can_place(degrees[1:], (*nodes[:node], free - degrees[0], *nodes[node + 1 :]))
        for node, free in enumerate(nodes)
    )


def fits_by_trial(problem: Problem, chosen: list[GroupKind]) -> bool:
    return all(
        can_place([group.degree for group in chosen if group.pool == pool], nodes)
        for pool, nodes in enumerate(problem.idle)
    )


def every_choice(problem: Problem) -> Iterator[list[tuple[float, GroupKind]]]:
    """All feasible assignments, one group or none for each request."""
    options = [
        [None, *((value, group) for group, value in item.values.items())]
        for item in problem.classes
        for _ in range(item.count)
    ]
    for combination in product(*options):
        chosen = [pair for pair in combination if pair is not None]
        if fits_by_trial(problem, [group for _, group in chosen]):
            yield chosen


@settings(max_examples=150)
@given(problems)
def test_the_ilp_equals_brute_force(problem: Problem) -> None:
    best = max(sum(value for value, _ in chosen) for chosen in every_choice(problem))
    solution = solve(problem, OPTIONS)
    assert is_feasible(problem, solution.counts)
    assert solution.method in ("uncontended", "ranked", "ilp")
    assert solution.evaluate(problem) == pytest.approx(best)
    assert solution.compute_gap(problem) == pytest.approx(0.0, abs=1e-6)


@settings(max_examples=150)
@given(problems)
def test_what_is_required_is_served_at_the_least_loss(problem: Problem) -> None:
    """The first class that can be served alone is required; the rest is as good as it can be beside it."""
    firsts = [
        (index, replace(item, count=1, required=True))
        for index, item in enumerate(problem.classes)
        if any(problem.fits({group: 1}) for group in item.values)
    ]
    if not firsts:
        return
    index, first = firsts[0]
    rest = tuple(item for other, item in enumerate(problem.classes) if other != index)
    required = Problem((first, *rest), problem.idle)
    best = max(
        value + sum(each for each, _ in chosen)
        for group, value in first.values.items()
        for chosen in every_choice(Problem(rest, problem.idle))
        if fits_by_trial(problem, [group, *(each for _, each in chosen)])
    )
    solution = solve(required, OPTIONS)
    assert is_feasible(required, solution.counts)
    assert solution.method in ("uncontended", "ranked", "ilp")
    assert solution.evaluate(required) == pytest.approx(best)
    assert is_feasible(required, plan_greedily(required).counts)
    assert not is_feasible(required, {})


@given(problems, st.lists(groups, max_size=6))
def test_nested_limits_are_exact(problem: Problem, chosen: list[GroupKind]) -> None:
    assert problem.fits(Counter(chosen)) == fits_by_trial(problem, chosen)


@given(problems)
def test_a_greedy_plan_is_feasible_and_leaves_nothing_that_fits(problem: Problem) -> None:
    solution = plan_greedily(problem)
    assert is_feasible(problem, solution.counts)
    taken: Counter[GroupKind] = Counter()
    for (_, group), n in solution.counts.items():
        taken[group] += n
    for index, item in enumerate(problem.classes):
        served = sum(n for (other, _), n in solution.counts.items() if other == index)
        if served < item.count:
            assert not any(problem.fits(taken + Counter([group])) for group in item.values)


def contended() -> Problem:
    """Three requests for two nodes of two: both kinds want width, and one wide group does less than two narrow ones."""
    kinds = ({GroupKind(0, 2): 12.0, GroupKind(0, 1): 10.0}, {GroupKind(0, 2): 11.0, GroupKind(0, 1): 9.0})
    return Problem((RequestClass(2, kinds[0]), RequestClass(1, kinds[1])), ((2, 2),))


def uneven() -> Problem:
    """Rounded, the LP is worth 33, where 34 is the best and the greedy plan is worth 20."""
    four, two, one = GroupKind(0, 4), GroupKind(0, 2), GroupKind(0, 1)
    classes = (
        RequestClass(2, {four: 20.0, one: 6.0}),
        RequestClass(2, {four: 10.0, two: 12.0, one: 5.0}),
        RequestClass(1, {four: 16.0, one: 16.0, two: 19.0}),
    )
    return Problem(classes, ((4,),))


def test_the_solver_is_asked_only_where_requests_compete(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_solver(*settings: Any) -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr(ilp, "_make_solver", no_solver)
    alone = Problem(contended().classes[:1], ((2, 2),))
    assert solve(alone, OPTIONS) == choose_best_groups(alone)
    assert solve(alone, OPTIONS).counts == {(0, GroupKind(0, 2)): 2}
    assert choose_best_groups(contended()) is None


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_both_solvers_prove_the_optimum_in_silence(solver: Any, capfd: pytest.CaptureFixture[str]) -> None:
    solution = solve(contended(), DispatchOptions(solver=solver, time_limit_s=30.0, gap=0.0))
    assert (solution.method, solution.evaluate(contended())) == ("ilp", 31.0)
    assert capfd.readouterr() == ("", "")


class Broken:
    """A solver that fails in a given way."""

    def __init__(self, how: str) -> None:
        self.how = how

    def actualSolve(self, model: Any) -> int:  # noqa: N802 (PuLP's name)
        if self.how == "raises":
            raise pulp.PulpSolverError("no binary, no licence")
        for variable in model.variables():
            variable.varValue = variable.upBound if self.how == "overbooks" else 0.0
        status, found = {
            "overbooks": (pulp.LpStatusOptimal, pulp.LpSolutionOptimal),
            "is cut short": (pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound),
            "finds nothing": (pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible),
            "finds less": (pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible),
        }[self.how]
        if self.how == "finds less":
            model.variables()[0].varValue = 1.0
        model.assignStatus(status, found)
        return int(status)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raises", "PulpSolverError: no binary; no licence"),
        ("is cut short", "no solution of the search at the time limit of 30 s"),
        ("finds nothing", "the search ended: Infeasible"),
        ("overbooks", "the solver broke a limit"),
    ],
)
def test_a_solver_that_fails_is_replaced_by_the_greedy_plan(
    monkeypatch: pytest.MonkeyPatch, how: str, why: str
) -> None:
    monkeypatch.setattr(ilp, "_make_solver", lambda *settings: Broken(how))
    solution = solve(contended(), OPTIONS)
    assert solution == plan_greedily(contended(), why)
    assert solution.found_by == f"greedy ({why})"
    assert is_feasible(contended(), solution.counts)


def test_a_solver_that_cannot_be_made_is_named_and_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_solver(*settings: Any) -> Any:
        raise OSError("no such file")

    monkeypatch.setattr(ilp, "_make_solver", no_solver)
    assert solve(contended(), OPTIONS).found_by == "greedy (OSError: no such file)"


class Relaxed(FastHiGHS):
    """HiGHS, but the LP and the search have these ends: None where they end as they do."""

    lp_values: dict[str, float] | None = None
    lp_status: tuple[bool, str] | None = None
    search: str | None = None

    def relax(self, lp: pulp.LpProblem) -> bool:
        is_solved = super().relax(lp)
        if self.lp_status is not None:
            self.is_out_of_time, self.status = self.lp_status
            return False
        if self.lp_values is not None:
            for variable in lp.variables():
                variable.varValue = self.lp_values.get(variable.name, 0.0)
        return is_solved

    def actualSolve(self, lp: pulp.LpProblem) -> int:  # noqa: N802 (PuLP's name)
        return super().actualSolve(lp) if self.search is None else Broken(self.search).actualSolve(lp)


def relaxed(monkeypatch: pytest.MonkeyPatch, **ends: Any) -> None:
    kind = type("RelaxedAsAsked", (Relaxed,), ends)
    monkeypatch.setattr(ilp, "_make_solver", lambda options: kind(options.time_limit_s, options.gap))


def crowd(required: bool = False) -> Problem:
    """More than a hundred requests, so that a plan within the gap is good enough: they fill one node of three hundred
    workers but for one, which the greedy plan makes use of, and the LP below does not."""
    wide = RequestClass(149, {GroupKind(0, 2): 1000.0})
    either = RequestClass(1, {GroupKind(0, 1): 1.0, GroupKind(0, 2): 2.0}, required)
    rest = RequestClass(2, {GroupKind(0, 1): 1.0})
    return Problem((wide, either, rest), ((300,),))


def test_a_greedy_plan_that_is_worth_more_than_the_rounded_lp_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the gap of the bound no search follows, so no time limit has anything to do with it."""
    relaxed(monkeypatch, lp_values={"x_1_0_1": 1.0}, search="raises")
    monkeypatch.setattr(ilp, "complete", lambda problem, counts: counts)
    solution = solve(crowd(), DispatchOptions(time_limit_s=5.0, gap=0.01))
    assert solution.found_by == "greedy (worth more than the rounded LP)"
    assert solution.compute_gap(crowd()) <= 0.01


def test_a_greedy_plan_whose_rounded_lp_loses_a_required_request_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    relaxed(monkeypatch, lp_values={"x_0_0_2": 149.0}, search="raises")
    monkeypatch.setattr(ilp, "complete", lambda problem, counts: counts)
    solution = solve(crowd(required=True), DispatchOptions(time_limit_s=5.0, gap=0.01))
    assert solution.found_by == "greedy (the rounded LP leaves out a request that has to be served)"


@pytest.mark.parametrize(
    ("ends", "found_by"),
    [
        ({"lp_status": (True, "Time limit reached")}, "greedy (no solution of the LP at the time limit of 5 s)"),
        ({"lp_status": (False, "Solve error")}, "greedy (the LP ended: Solve error)"),
    ],
)
def test_an_lp_without_a_solution_says_why(monkeypatch: pytest.MonkeyPatch, ends: Any, found_by: str) -> None:
    """The greedy plan is within the gap even of what everybody's best groups would be worth."""
    relaxed(monkeypatch, **ends, search="raises")
    assert solve(crowd(), DispatchOptions(time_limit_s=5.0, gap=0.01)).found_by == found_by


@pytest.mark.parametrize(
    ("search", "found_by"),
    [
        ("raises", "incumbent (PulpSolverError: no binary; no licence)"),
        ("overbooks", "incumbent (the solver broke a limit)"),
        ("finds less", "incumbent (worth more than the solver's plan at the time limit of 30 s)"),
    ],
)
def test_a_rounded_lp_that_no_search_could_better_says_why(
    monkeypatch: pytest.MonkeyPatch, search: str, found_by: str
) -> None:
    assert (solve(uneven(), OPTIONS).evaluate(uneven()), solve(uneven(), OPTIONS).found_by) == (34.0, "ilp")
    relaxed(monkeypatch, search=search)
    solution = solve(uneven(), OPTIONS)
    assert (solution.evaluate(uneven()), solution.found_by) == (33.0, found_by)


def test_cbc_is_not_asked_where_the_greedy_plan_is_good_enough() -> None:
    solution = solve(crowd(), DispatchOptions(solver="cbc", time_limit_s=30.0, gap=0.01))
    assert solution.found_by == "greedy (within the gap of the bound)"


def hard() -> Problem:
    """Many classes whose values differ a little."""
    wide = [GroupKind(pool, k) for pool in (0, 1) for k in (1, 2, 4)]
    classes = [
        RequestClass(3, {group: 1000 + (index * 37 + group.pool * 11 + group.degree * 5) % 101 / 7 for group in wide})
        for index in range(120)
    ]
    return Problem(tuple(classes), ((7,) * 12, (5,) * 12))


def test_the_reported_gap_is_proved_and_kept() -> None:
    """More than 100 requests compete, so that the first solution within the gap is taken."""
    best = solve(hard(), DispatchOptions(time_limit_s=30.0, gap=1e-6))
    loose = solve(hard(), DispatchOptions(time_limit_s=30.0, gap=0.01))
    assert best.method == loose.method == "ilp"
    assert loose.evaluate(hard()) <= best.evaluate(hard()) * (1 + 1e-6)
    assert best.evaluate(hard()) <= loose.bound * (1 + 1e-9)
    assert loose.compute_gap(hard()) <= 0.01
    assert best.compute_gap(hard()) <= 1e-6


def test_a_time_limit_still_gives_a_feasible_plan() -> None:
    """No machine solves anything in a nanosecond."""
    solution = solve(hard(), DispatchOptions(time_limit_s=1e-9))
    assert solution.method in ("incumbent", "greedy")
    assert solution.compute_gap(hard()) > DispatchOptions().gap, "it was cut short"
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

    monkeypatch.setattr(ilp, "_make_solver", lambda *settings: Stopped("finds less"))
    solution = solve(contended(), OPTIONS)
    assert (solution.method, sum(solution.counts.values())) == ("incumbent", 3)
    assert is_feasible(contended(), solution.counts)
