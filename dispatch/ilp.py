"""The integer program of one tick, in PuLP (TridentServe, arXiv 2510.02838, section 6.2).

What is on time is known for each (request, type, degree) before the solve, so the paper's big-M variables (C3) are not
needed; requests that are alike share an integer variable. A tick never fails: at the time limit the best solution so
far counts, and a greedy plan takes over when there is none.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pulp

from dispatch.options import DispatchOptions
from dispatch.problem import Problem, Slot, Solution, best_slots, greedy, is_feasible

_Variables = dict[tuple[int, Slot], Any]


def solve(problem: Problem, options: DispatchOptions) -> Solution:
    """The best solution found within the time limit; always feasible, and the same for the same problem unless the
    time limit cuts the search short."""
    if (uncontended := best_slots(problem)) is not None:
        return uncontended
    try:
        solution = _solve_ilp(problem, options)
    except Exception as error:  # whatever a solver does (no binary, out of memory, a crash), the tick goes on
        return greedy(problem, f"{type(error).__name__}: {error}")
    if solution is None:
        return greedy(problem, f"no solution within {options.time_limit_s} s")
    return solution if is_feasible(problem, solution.counts) else greedy(problem, "the solver broke a limit")


def _solve_ilp(problem: Problem, options: DispatchOptions) -> Solution | None:
    model, variables = _build(problem)
    model.solve(_solver(options))
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    counts = {key: n for key, variable in variables.items() if (n := round(variable.value() or 0))}
    return Solution(counts, "ilp" if model.sol_status == pulp.LpSolutionOptimal else "incumbent")


def _build(problem: Problem) -> tuple[pulp.LpProblem, _Variables]:
    model = pulp.LpProblem("dispatch", pulp.LpMaximize)
    variables: _Variables = {}
    workers: defaultdict[int, dict[Any, int]] = defaultdict(dict)
    for index, item in enumerate(problem.classes):
        for slot in item.values:
            most = min(item.count, problem.capacity(slot.pool, slot.degree))
            name = f"x_{index}_{slot.pool}_{slot.degree}"
            variable = model.add_variable(name, lowBound=0, upBound=most, cat=pulp.LpInteger)
            variables[index, slot] = variable
            workers[slot.pool][variable] = slot.degree
    values = [(variable, problem.classes[index].values[slot]) for (index, slot), variable in variables.items()]
    model.setObjective(pulp.LpAffineExpression(values))
    for index, item in enumerate(problem.classes):  # C1
        served = pulp.LpAffineExpression([(variables[index, slot], 1) for slot in item.values])
        model += served == item.count if item.required else served <= item.count
    for pool, degrees in workers.items():  # C2, per node: see Problem.fits
        for block in sorted(set(degrees.values())):
            wide = [(variable, degree) for variable, degree in degrees.items() if degree >= block]
            model += pulp.LpAffineExpression(wide) <= block * problem.capacity(pool, block)
    return model, variables


def _solver(options: DispatchOptions) -> pulp.LpSolver:
    # Secondary terms are a millionth of the reward, far below the solvers' default gap (1e-4). One thread: no start-up
    # cost, and the same answer each time.
    if options.solver == "CBC":
        path = pulp.PULP_CBC_CMD.pulp_cbc_path  # the binary that comes with PuLP
        return pulp.COIN_CMD(path=path, msg=False, timeLimit=options.time_limit_s, gapRel=0, threads=1)
    return pulp.HiGHS(msg=False, timeLimit=options.time_limit_s, gapRel=0, gapAbs=1e-6, threads=1)
