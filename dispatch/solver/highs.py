"""HiGHS through PuLP, set up for integer programs of a few hundred variables that must be solved in milliseconds."""

from __future__ import annotations

from itertools import accumulate, chain
from math import floor
from operator import attrgetter, itemgetter

import highspy
import numpy as np
import pulp

# These programs are nearly integral: the first LP leaves a handful of fractions, one per limit in use at most. What
# HiGHS does before and during the search pays off for hard programs only, and took most of the time.
_PLAIN_SEARCH = {
    "presolve": "off",
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_detect_symmetry": False,
    "mip_allow_restart": False,
}
# More LPs than this would take as long as a search.
_MOST_DIVES = 20
_ROUNDING = 1e-6
_FEASIBLE = highspy.SolutionStatus.kSolutionStatusFeasible


class FastHiGHS(pulp.HiGHS):  # type: ignore[misc]
    """`pulp.HiGHS` that can solve the LP alone, reports the bound that was proved, and hands the whole program over at
    once (PuLP does it column by column and row by row, which takes longer than the search).

    It is for maxima over integers with finite limits, all of which are in the objective.
    """

    bound: float = float("inf")
    is_out_of_time: bool = False
    """True when the latest call of the solver ended at the time limit."""
    status: str = "not run"
    """The words of HiGHS for the end of the latest call of the solver."""

    def __init__(self, time_limit_s: float, gap: float) -> None:
        """`gap`: how far from the bound a solution may be, relative to it."""
        super().__init__(msg=False, timeLimit=time_limit_s, gapRel=gap, gapAbs=1e-6, threads=1, **_PLAIN_SEARCH)

    def relax(self, lp: pulp.LpProblem) -> bool:
        """Give the variables the values of the LP, and set `bound`. False when there are none."""
        self.createAndConfigureSolver(lp)
        variables = _list_variables(lp)
        lp.solverModel.passModel(_build_program(lp, variables))
        if self._run(lp.solverModel) != highspy.HighsModelStatus.kOptimal:
            return False
        self.bound = -lp.solverModel.getInfo().objective_function_value
        _read(lp.solverModel, variables)
        return True

    def dive(self, lp: pulp.LpProblem) -> bool:
        """Give the variables the values of LPs in which one fraction after another is made whole: up, or down where
        nothing fits then, the one that is nearest to the whole number above it first. Each LP begins where the one
        before it ended, which is quick. False when this leads nowhere. `relax` has seen the same program."""
        highs, variables = lp.solverModel, _list_variables(lp)
        changed: set[int] = set()
        values = highs.getSolution().col_value
        for _ in range(_MOST_DIVES):
            column, part = max(enumerate(map(_find_fraction, values)), key=itemgetter(1))
            if not part:
                break
            changed.add(column)
            whole = floor(values[column])
            if not (
                self._limit(highs, column, whole + 1.0, variables[column].upBound)
                or self._limit(highs, column, variables[column].lowBound, whole)
            ):
                break
            values = highs.getSolution().col_value
        is_whole = not any(map(_find_fraction, values))
        if is_whole:
            _read(highs, variables)
        for column in changed:
            highs.changeColBounds(column, variables[column].lowBound, variables[column].upBound)
        return is_whole

    def _limit(self, highs: highspy.Highs, column: int, low: float, high: float) -> bool:
        """Solve the LP with other limits of a variable. False when it has no solution."""
        highs.changeColBounds(column, low, high)
        return bool(self._run(highs) == highspy.HighsModelStatus.kOptimal)

    def actualSolve(self, lp: pulp.LpProblem) -> int:  # noqa: N802 (PuLP's name)
        """Search from the solution that the variables have. `relax` has seen the same program."""
        highs, variables = lp.solverModel, _list_variables(lp)
        highs.setOptionValue("presolve", "on")
        kinds = np.full(len(variables), int(highspy.HighsVarType.kInteger), dtype=np.uint8)
        highs.changeColsIntegrality(len(variables), np.arange(len(variables), dtype=np.int32), kinds)
        highs.setSolution(_start(variables))
        status, info = self._run(highs), highs.getInfo()
        found = pulp.LpSolutionNoSolutionFound
        if status == highspy.HighsModelStatus.kOptimal:
            found = pulp.LpSolutionOptimal
        elif self.is_out_of_time and info.primal_solution_status == _FEASIBLE:
            found = pulp.LpSolutionIntegerFeasible
        if found != pulp.LpSolutionNoSolutionFound:
            self.bound = min(self.bound, -info.mip_dual_bound)
            _read(highs, variables)
        return _assign(lp, found)

    def _run(self, highs: highspy.Highs) -> highspy.HighsModelStatus:
        highs.run()
        status: highspy.HighsModelStatus = highs.getModelStatus()
        self.is_out_of_time = status == highspy.HighsModelStatus.kTimeLimit
        self.status = highs.modelStatusToString(status)
        return status


def _list_variables(lp: pulp.LpProblem) -> list[pulp.LpVariable]:
    """The variables in the order of PuLP, which would look for them in all constraints."""
    return sorted(lp.objective, key=attrgetter("name"))


def _assign(lp: pulp.LpProblem, found: int) -> int:
    """Record a solution's status in the problem, as PuLP expects; return the status."""
    status = pulp.LpStatusNotSolved if found == pulp.LpSolutionNoSolutionFound else pulp.LpStatusOptimal
    lp.assignStatus(status, found)
    return int(status)


def _read(highs: highspy.Highs, variables: list[pulp.LpVariable]) -> None:
    for variable, value in zip(variables, highs.getSolution().col_value, strict=True):
        variable.varValue = value


def _find_fraction(value: float) -> float:
    """The part of a number above the whole number below it; 0 for one that is whole, rounding aside."""
    return 0.0 if abs(value - round(value)) < _ROUNDING else value - floor(value)


def _start(variables: list[pulp.LpVariable]) -> highspy.HighsSolution:
    solution = highspy.HighsSolution()
    solution.col_value = [variable.varValue for variable in variables]
    return solution


def _build_program(lp: pulp.LpProblem, variables: list[pulp.LpVariable]) -> highspy.HighsLp:
    """The program without whole numbers, as a minimum. HiGHS copies lists several times as fast as arrays here."""
    rows = lp.constraints()
    expressions = [row.expr for row in rows]
    column_of = {variable: column for column, variable in enumerate(variables)}
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(variables), len(rows)
    program.col_cost_ = [-lp.objective.get(variable, 0.0) for variable in variables]
    program.col_lower_ = [variable.lowBound for variable in variables]
    program.col_upper_ = [variable.upBound for variable in variables]
    program.row_lower_ = [-np.inf if (low := row.getLb()) is None else low for row in rows]
    program.row_upper_ = [np.inf if (high := row.getUb()) is None else high for row in rows]
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = [0, *accumulate(map(len, expressions))]
    matrix.index_ = [column_of[variable] for variable in chain.from_iterable(expressions)]
    matrix.value_ = list(chain.from_iterable(expression.values() for expression in expressions))
    return program
