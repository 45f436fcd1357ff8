"""Independent parts of an assignment problem: pools that no request could choose between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dispatch.solver.problem import METHODS, GroupKind, Problem, Solution


@dataclass(frozen=True, slots=True)
class ProblemPart:
    """A part of a problem that shares no pool with the others."""

    problem: Problem
    """The part as a problem of its own. Pools keep their numbers."""
    indices: tuple[int, ...]
    """The index that each of its classes has in the whole problem."""


def split_into_parts(problem: Problem) -> list[ProblemPart]:
    """Classes that can use the same pools, or are linked by others that can, stay together. Searches multiply where
    independent parts are solved as one."""
    parent = list(range(len(problem.idle)))

    def root(pool: int) -> int:
        while parent[pool] != pool:
            parent[pool] = parent[parent[pool]]
            pool = parent[pool]
        return pool

    for item in problem.classes:
        pools = sorted({group.pool for group in item.values})
        for pool in pools[1:]:
            parent[root(pool)] = root(pools[0])
    grouped: dict[int, list[int]] = {}
    for index, item in enumerate(problem.classes):
        if item.values:
            grouped.setdefault(root(next(iter(item.values)).pool), []).append(index)
    return [
        ProblemPart(replace(problem, classes=tuple(problem.classes[index] for index in indices)), tuple(indices))
        for indices in grouped.values()
    ]


def join_solutions(parts: Sequence[ProblemPart], solutions: Sequence[Solution]) -> Solution:
    """The solution of the whole problem: the method is the least certain of any part, with its reason."""
    counts: dict[tuple[int, GroupKind], int] = {}
    for part, solution in zip(parts, solutions, strict=True):
        counts.update({(part.indices[index], group): n for (index, group), n in solution.counts.items()})
    worst = max(solutions, key=lambda solution: (METHODS.index(solution.method), bool(solution.why)), default=None)
    bound = sum(solution.bound for solution in solutions)
    if worst is None:
        return Solution({}, "uncontended", bound)
    return Solution(counts, worst.method, bound, worst.why)
