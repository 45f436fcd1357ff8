"""The integer program of one tick, in PuLP (TridentServe, arXiv 2510.02838, section 6.2).

What is on time is known for each (request, type, degree) before the solve, so the paper's big-M variables (C3) are not
needed; requests that are alike share an integer variable. A tick never fails: at the time limit the best solution so
far counts, and a greedy plan takes over when there is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import floor
from typing import Any

import pulp

from dispatch.highs import FastHiGHS
from dispatch.options import DispatchOptions
from dispatch.problem import (
    Problem,
    Slot,
    Solution,
    best_ranked,
    best_slots,
    completed,
    greedy,
    is_feasible,
    upper_bound,
    value_of,
)

# How far below a whole number a solver's value may be and still mean it.
_ROUNDING = 1e-6

# Up to so many requests the optimum is found as fast as anything close to it, and prices are not small beside the gap.
_SMALL = 100

_Variables = dict[tuple[int, Slot], Any]


def solve(problem: Problem, options: DispatchOptions) -> Solution:
    """The best solution found within the time limit; always feasible, and the same for the same problem unless the
    time limit cuts the search short. No request is left out that still fits."""
    if (best := best_slots(problem) or best_ranked(problem)) is not None:
        return best
    try:
        solution = _solve_ilp(problem, options)
    except Exception as error:  # whatever a solver does (no binary, out of memory, a crash), the tick goes on
        return greedy(problem, f"{type(error).__name__}: {error}")
    if solution is None:
        return greedy(problem, f"no solution within {options.time_limit_s} s")
    if solution.method == "incumbent":
        return _best_at_the_limit(problem, solution, options)
    return solution


def _best_at_the_limit(problem: Problem, incumbent: Solution, options: DispatchOptions) -> Solution:
    """A search that was cut short may have less than the greedy plan."""
    other = greedy(problem, f"nothing better within {options.time_limit_s} s")
    return incumbent if incumbent.value(problem) >= other.value(problem) else other


def _solve_ilp(problem: Problem, options: DispatchOptions) -> Solution | None:
    model, variables = _build(problem)

    def rounded() -> float | None:
        """Down, so that all limits are kept, and then whatever still fits."""
        down = {key: floor(variable.varValue + _ROUNDING) for key, variable in variables.items()}
        counts = completed(problem, {key: n for key, n in down.items() if n})
        if not is_feasible(problem, counts):
            return None  # a required request has lost its slot
        for key, variable in variables.items():
            variable.varValue = float(counts.get(key, 0))
        return value_of(problem, counts)

    gap = options.gap if sum(item.count for item in problem.classes) > _SMALL else 0.0
    solver = _solver(options, gap, rounded)
    model.solve(solver)
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    counts = {key: n for key, variable in variables.items() if (n := round(variable.varValue or 0))}
    if not is_feasible(problem, counts):
        return greedy(problem, "the solver broke a limit")
    is_proved = model.sol_status == pulp.LpSolutionOptimal
    bound = getattr(solver, "bound", None)
    if bound is None:  # this solver tells none: what is proved is the gap that it was asked for
        bound = value_of(problem, counts) * (1 + gap) if is_proved else upper_bound(problem)
    return Solution(completed(problem, counts), "ilp" if is_proved else "incumbent", bound)


def _build(problem: Problem) -> tuple[pulp.LpProblem, _Variables]:
    model = pulp.LpProblem("dispatch", pulp.LpMaximize)
    variables: _Variables = {}
    values: list[tuple[Any, float]] = []
    workers: defaultdict[int, list[tuple[Any, int]]] = defaultdict(list)
    for index, item in enumerate(problem.classes):  # C1
        served: list[tuple[Any, int]] = []
        for slot, value in item.values.items():
            most = min(item.count, problem.capacity(slot.pool, slot.degree))
            name = f"x_{index}_{slot.pool}_{slot.degree}"
            variable = model.add_variable(name, lowBound=0, upBound=most, cat=pulp.LpInteger)
            variables[index, slot] = variable
            values.append((variable, value))
            served.append((variable, 1))
            workers[slot.pool].append((variable, slot.degree))
        if item.required or len(served) > 1:  # otherwise the variable's own limit says it
            sense = pulp.LpConstraintEQ if item.required else pulp.LpConstraintLE
            model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(served), sense, rhs=item.count))
    model.setObjective(pulp.LpAffineExpression(values))
    for pool, degrees in workers.items():  # C2, per node: see Problem.fits
        for block in sorted({degree for _, degree in degrees}):
            wide = pulp.LpAffineExpression([(variable, degree) for variable, degree in degrees if degree >= block])
            model.addConstraint(pulp.LpConstraint(wide, pulp.LpConstraintLE, rhs=block * problem.capacity(pool, block)))
    return model, variables


def _solver(options: DispatchOptions, gap: float, rounded: Callable[[], float | None]) -> pulp.LpSolver:
    # One thread: no start-up cost, and the same answer each time.
    if options.solver == "CBC":
        path = pulp.PULP_CBC_CMD.pulp_cbc_path  # the binary that comes with PuLP
        return pulp.COIN_CMD(path=path, msg=False, timeLimit=options.time_limit_s, gapRel=gap, threads=1)
    return FastHiGHS(options.time_limit_s, gap, rounded)
