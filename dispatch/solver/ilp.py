"""The integer program of one tick, in PuLP (TridentServe, arXiv 2510.02838, section 6.2).

What is on time is known for each (request, type, degree) before the solve, so the paper's big-M variables (C3) are not
needed; requests that are alike share an integer variable. A tick never fails: at the time limit the best solution so
far counts, and a greedy plan takes over when there is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import floor
from typing import Any

import pulp
from pulp.mps_lp import MPSVariable

from dispatch.options import DispatchOptions
from dispatch.solver.highs import FastHiGHS
from dispatch.solver.problem import (
    GroupKind,
    Problem,
    Solution,
    choose_best_groups,
    choose_ranked,
    complete,
    compute_upper_bound,
    compute_value,
    is_feasible,
    join_solutions,
    plan_greedily,
    split_into_parts,
)

# The distance below a whole number at which a solver's value still means it.
_ROUNDING = 1e-6

# Stands in the reason of every plan for which a search was cut short, but for a plain `incumbent`.
_TIME_LIMIT = "time limit"

# A lack that is nothing but rounding.
_GAP_ABS, _GAP_REL = 1e-6, 1e-9

# Up to this many requests the optimum is found as fast as anything close to it.
_SMALL = 100

# The variables, each with the index of its class and its group.
_Variables = list[tuple[tuple[int, GroupKind], Any]]

# PuLP makes variables for a problem, which in this version they do not remember.
_OWNER = pulp.LpProblem("dispatch", pulp.LpMaximize)


def solve(problem: Problem, options: DispatchOptions) -> Solution:
    """The best solution found within the time limit; always feasible, and the same for the same problem unless the
    time limit cuts the search short. No request is left out that still fits.

    Each independent part is solved as an LP and rounded first. Where the whole is not close enough to its bound, one
    fraction of an LP after another is made whole, in the parts with the largest gaps first; and where that is not
    enough either, these parts are searched.
    """
    parts = split_into_parts(problem)
    gap = options.gap if sum(item.count for item in problem.classes) > _SMALL else 0.0
    limited = replace(options, gap=gap, time_limit_s=options.time_limit_s / max(len(parts), 1))
    searches = [_Search(part.problem, limited) for part in parts]
    solutions = [search.find_first() for search in searches]
    whole = join_solutions(parts, solutions)
    # For few requests nothing but the optimum will do, which a search finds at once.
    for find in (_Search.find_deeper, _Search.find_better) if gap else (_Search.find_better,):
        order = sorted(range(len(parts)), key=lambda index: -_measure_lack(parts[index].problem, solutions[index]))
        for index in order:
            if _is_close(problem, whole, gap):
                break
            solutions[index] = find(searches[index])
            whole = join_solutions(parts, solutions)
    is_proved = whole.method == "incumbent" and _is_close(problem, whole, gap)
    return replace(whole, method="ilp") if is_proved else whole


def is_cut_short(found_by: str) -> bool:
    """True when a search ended at its time limit, by `Solution.found_by`: another run may decide otherwise."""
    return found_by == "incumbent" or _TIME_LIMIT in found_by


def _is_close(problem: Problem, solution: Solution, gap: float, gap_abs: float = _GAP_ABS) -> bool:
    """True when a solution is as near to its bound as is asked for, rounding aside."""
    return _measure_lack(problem, solution) <= max(gap, _GAP_REL) * solution.evaluate(problem) + gap_abs


def _measure_lack(problem: Problem, solution: Solution) -> float:
    """The most that another solution could be worth above this one."""
    return solution.bound - solution.evaluate(problem)


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan that a solver has found, and what to call it in a reason."""

    solution: Solution
    name: str


class _Search:
    """A part, its program and the best solution so far."""

    def __init__(self, problem: Problem, options: DispatchOptions) -> None:
        self._problem = problem
        self._options = options
        self._has_crashed = False
        self._best: Solution

    def find_first(self) -> Solution:
        """The solution that needs no search: the optimum where no request has to choose, the rounded LP, or else a
        greedy plan."""
        if (best := choose_best_groups(self._problem) or choose_ranked(self._problem)) is not None:
            self._best = best
            return best
        relaxed = self._attempt(self._solve_relaxed)
        if isinstance(relaxed, _Found) and _is_close(self._problem, relaxed.solution, gap=0.0, gap_abs=0.0):
            self._best = relaxed.solution  # no plan is worth more
        else:
            # The plan keeps this reason where neither an LP nor a search gives another one.
            self._best = plan_greedily(self._problem, "within the gap of the bound")
            self._keep(relaxed)
        if self._best.method == "incumbent" and _measure_lack(self._problem, self._best) <= _GAP_ABS:
            self._best = replace(self._best, method="ilp")
        return self._best

    def find_deeper(self) -> Solution:
        """The solution of LPs that are made whole step by step; never worse than the first."""
        if _measure_lack(self._problem, self._best) > _GAP_ABS and not self._has_crashed:
            self._keep(self._attempt(self._dive))
        return self._best

    def find_better(self) -> Solution:
        """The best solution that the solver finds within its limits; never worse than the first."""
        if _measure_lack(self._problem, self._best) > _GAP_ABS and not self._has_crashed:
            self._keep(self._attempt(self._solve))
        return self._best

    def _attempt(self, step: Callable[[], _Found | str]) -> _Found | str:
        """The solution that a step finds, or the reason why it finds none."""
        try:
            return step()
        except Exception as error:  # whatever a solver does (no binary, out of memory, a crash), the tick continues
            self._has_crashed = True
            return f"{type(error).__name__}: {error}".replace(",", ";")

    def _keep(self, found: _Found | str) -> None:
        """Keep the better solution and the better bound."""
        if isinstance(found, str):
            self._best = replace(self._best, why=found or self._best.why)
            return
        bound = min(found.solution.bound, self._best.bound)
        if found.solution.evaluate(self._problem) >= self._best.evaluate(self._problem):
            self._best = replace(found.solution, bound=bound)
        else:
            self._best = replace(self._best, bound=bound, why=f"worth more than {found.name}")

    def _solve_relaxed(self) -> _Found | str:
        """The LP, rounded down so that all limits are kept, and then whatever still fits."""
        self._model, self._variables = _build(self._problem)
        self._solver = _make_solver(self._options)
        if not isinstance(self._solver, FastHiGHS):
            return ""  # it cannot solve the LP alone
        if not self._solver.relax(self._model):
            return self._explain_nothing("LP")
        down = {key: n for key, variable in self._variables if (n := floor(variable.varValue + _ROUNDING))}
        counts = complete(self._problem, down)
        if not is_feasible(self._problem, counts):
            why = "the rounded LP leaves out a request that has to be served"
            return _Found(replace(plan_greedily(self._problem, why), bound=self._solver.bound), "the greedy plan")
        return _Found(Solution(counts, "incumbent", self._solver.bound), "the rounded LP")

    def _dive(self) -> _Found | str:
        """The LP with all fractions made whole, and then whatever still fits."""
        if not isinstance(self._solver, FastHiGHS) or not self._solver.dive(self._model):
            return ""
        whole = {key: n for key, variable in self._variables if (n := round(variable.varValue))}
        if not is_feasible(self._problem, whole):
            return ""
        return _Found(Solution(complete(self._problem, whole), "incumbent", self._solver.bound), "the dive")

    def _solve(self) -> _Found | str:
        """The search, from the best solution so far."""
        for key, variable in self._variables:
            variable.varValue = float(self._best.counts.get(key, 0))
        self._model.solve(self._solver)
        status = self._model.sol_status
        if status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return self._explain_nothing("search")
        counts = {key: n for key, variable in self._variables if (n := round(variable.varValue or 0))}
        if not is_feasible(self._problem, counts):
            return "the solver broke a limit"
        is_proved = status == pulp.LpSolutionOptimal
        if isinstance(self._solver, FastHiGHS):
            bound = self._solver.bound
        else:  # CBC reports no bound: the gap that it was asked for is proved
            proved = compute_value(self._problem, counts) * (1 + self._options.gap)
            bound = proved if is_proved else compute_upper_bound(self._problem)
        solution = Solution(complete(self._problem, counts), "ilp" if is_proved else "incumbent", bound)
        return _Found(solution, "the solver's plan" if is_proved else f"the solver's plan {self._at_time_limit}")

    @property
    def _at_time_limit(self) -> str:
        return f"at the {_TIME_LIMIT} of {self._options.time_limit_s:g} s"

    def _explain_nothing(self, what: str) -> str:
        """The reason why the LP or the search has ended without a solution."""
        if isinstance(self._solver, FastHiGHS):
            is_out_of_time, status = self._solver.is_out_of_time, self._solver.status
        else:
            is_out_of_time = self._model.status == pulp.LpStatusNotSolved
            status = pulp.LpStatus[self._model.status]
        return f"no solution of the {what} {self._at_time_limit}" if is_out_of_time else f"the {what} ended: {status}"


class _Variable(pulp.LpVariable):  # type: ignore[misc]
    """A variable that dictionaries find as fast as any object: PuLP's hash is a call of Python."""

    __hash__ = object.__hash__


@lru_cache(maxsize=1 << 14)
def _make_variable(index: int, group: GroupKind) -> Any:
    """The variable of the class with this index and a group. It serves in all programs, one after another, as PuLP
    takes long to make it; parts of a problem, which are solved side by side, share no pool."""
    name = f"x_{index}_{group.pool}_{group.degree}"
    return _Variable.fromDataclass(_OWNER, MPSVariable(name, pulp.LpInteger, lowBound=0))


@lru_cache(maxsize=1 << 14)
def _make_row(index: int, groups: tuple[GroupKind, ...]) -> tuple[tuple[Any, ...], pulp.LpAffineExpression]:
    """The variables of the class with this index and some groups, and their sum, which serve likewise."""
    variables = tuple(_make_variable(index, group) for group in groups)
    return variables, pulp.LpAffineExpression(dict.fromkeys(variables, 1))


def _build(problem: Problem) -> tuple[pulp.LpProblem, _Variables]:
    model = pulp.LpProblem("dispatch", pulp.LpMaximize)
    variables: _Variables = []
    values: dict[Any, float] = {}
    degrees: defaultdict[int, dict[Any, int]] = defaultdict(dict)
    for index, item in enumerate(problem.classes):  # C1
        row, served = _make_row(index, tuple(item.values))
        for variable, (group, value) in zip(row, item.values.items(), strict=True):
            variable.upBound = min(item.count, problem.count_capacity(group))
            variables.append(((index, group), variable))
            values[variable], degrees[group.pool][variable] = value, group.degree
        if item.required or len(row) > 1:  # otherwise the variable's own limit says it
            sense = pulp.LpConstraintEQ if item.required else pulp.LpConstraintLE
            model.addConstraint(pulp.LpConstraint(served, sense, rhs=item.count))
    model.setObjective(pulp.LpAffineExpression(values))
    for pool, degree_of in degrees.items():  # C2, per node: see Problem.fits
        for block in sorted(set(degree_of.values())):
            wide = {variable: degree for variable, degree in degree_of.items() if degree >= block}
            room = block * problem.count_capacity(GroupKind(pool, block))
            model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(wide), pulp.LpConstraintLE, rhs=room))
    return model, variables


def _make_solver(options: DispatchOptions) -> pulp.LpSolver:
    # One thread: no start-up cost, and the same answer each time.
    if options.solver == "cbc":
        path = pulp.PULP_CBC_CMD.pulp_cbc_path  # the binary that comes with PuLP
        return pulp.COIN_CMD(path=path, msg=False, timeLimit=options.time_limit_s, gapRel=options.gap, threads=1)
    return FastHiGHS(options.time_limit_s, options.gap)
