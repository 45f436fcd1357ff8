"""One tick's assignment problem, free of requests and workers: what the ILP, the greedy plan and the tests share.

A problem falls apart where no request could choose between some of its pools; the parts are solved on their own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args


class GroupKind(NamedTuple):
    """A group to be formed: `degree` idle workers of one pool, all in one node."""

    pool: int
    degree: int


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Identical requests, and what each group is worth to one of them."""

    count: int
    """The number of requests."""
    values: Mapping[GroupKind, float]
    """All are above 0."""
    required: bool = False
    """True when each of them must have a group, whatever that costs others. Those of a problem fit together."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Choose groups for requests so that the sum of values is largest. `idle[pool]` holds the idle workers per node."""

    classes: tuple[RequestClass, ...]
    idle: tuple[tuple[int, ...], ...]
    _capacities: dict[GroupKind, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def count_capacity(self, group: GroupKind) -> int:
        """The number of such groups that the idle workers of the pool form: no group crosses a node."""
        if (known := self._capacities.get(group)) is None:
            known = self._capacities[group] = sum([idle // group.degree for idle in self.idle[group.pool]])
        return known

    def fits(self, groups: Mapping[GroupKind, int]) -> bool:
        """True when these numbers of groups can be formed at once.

        Degrees are powers of two, so they nest: a choice fits exactly when, for every degree j in use, the workers in
        groups of j or wider are no more than the nodes offer in blocks of j.
        """
        in_use = [(group, n) for group, n in groups.items() if n > 0]
        return all(
            sum(wide.degree * n for wide, n in in_use if wide.pool == group.pool and wide.degree >= group.degree)
            <= group.degree * self.count_capacity(group)
            for group, _ in in_use
        )


class _Room:
    """The idle workers that are left while groups are taken, which all fit."""

    def __init__(self, problem: Problem) -> None:
        self._free: dict[int, dict[int, int]] = {}
        """By pool and degree: the workers that groups of this degree or wider could still have (`Problem.fits`)."""
        self.open: set[GroupKind] = set()
        """The groups for which there may be room. Where there is none, there is none later."""
        for item in problem.classes:
            self.open.update(item.values)
        for group in sorted(self.open):
            free = group.degree * problem.count_capacity(group)
            self._free.setdefault(group.pool, {})[group.degree] = free

    def take(self, group: GroupKind, most: int) -> int:
        """Take as many of these groups as fit, and no more than that. Returns their number."""
        blocks = self._free[group.pool]
        room = min([free for block, free in blocks.items() if block <= group.degree]) // group.degree
        taken = min(room, most)
        if taken:
            for block in blocks:
                if block <= group.degree:
                    blocks[block] -= group.degree * taken
        if taken == room:
            self.open.discard(group)
        return taken


# `uncontended`: every request has its best group, so no solver was asked. `ranked`: no request has a choice and all
# groups of a pool are equally wide, so that those worth the most have them. `ilp`: proved optimal, within the gap of
# the options. `incumbent`: the best that was found before the solver stopped, at its time limit where no other reason
# is given. `plan_greedily`: the list plan, as nothing better was found; the reason says what was tried.
Method = Literal["uncontended", "ranked", "ilp", "incumbent", "greedy"]
METHODS: tuple[Method, ...] = get_args(Method)  # the most certain first
GroupCounts = Mapping[tuple[int, GroupKind], int]


@dataclass(frozen=True, slots=True)
class Solution:
    """The number of requests of each class that get each group, and the method that found it."""

    counts: GroupCounts
    """Requests by the index of their class and the group."""
    method: Method
    """See `Method`."""
    bound: float
    """Proved: no solution is worth more."""
    why: str = ""
    """Why the solver's answer is not used, or why the search ended early. It has no commas, as it ends the reasons of
    decisions (`Counts.methods` of simulations)."""

    @property
    def found_by(self) -> str:
        """The method, with what is to be said of it."""
        return f"{self.method} ({self.why})" if self.why else self.method

    def evaluate(self, problem: Problem) -> float:
        """The objective."""
        return compute_value(problem, self.counts)

    def compute_gap(self, problem: Problem) -> float:
        """The most that another solution could be worth above this one, relative to the worth of this one."""
        value = self.evaluate(problem)
        return max(self.bound - value, 0.0) / value if value else 0.0


def compute_value(problem: Problem, counts: GroupCounts) -> float:
    """The sum of values."""
    return sum(n * problem.classes[index].values[group] for (index, group), n in counts.items())


def compute_upper_bound(problem: Problem) -> float:
    """The value that all requests would have together with their best groups."""
    return sum(item.count * max(item.values.values(), default=0.0) for item in problem.classes)


def is_feasible(problem: Problem, counts: GroupCounts) -> bool:
    """True when counts keep every limit: each request at most once, those required once (C1), idle workers and nodes
    (C2)."""
    per_class: Counter[int] = Counter()
    per_group: Counter[GroupKind] = Counter()
    for (index, group), n in counts.items():
        if n < 0 or group not in problem.classes[index].values:
            return False
        per_class[index] += n
        per_group[group] += n
    return problem.fits(per_group) and all(
        per_class[index] == item.count if item.required else per_class[index] <= item.count
        for index, item in enumerate(problem.classes)
    )


def choose_best_groups(problem: Problem) -> Solution | None:
    """Every request at its best group, if those fit at once: then nothing can be better, and no solver is needed."""
    if sum([item.count for item in problem.classes if item.values]) > sum(map(sum, problem.idle)):
        return None  # not even with one worker each
    best = [(index, _find_best_group(item.values)) for index, item in enumerate(problem.classes) if item.values]
    per_group: defaultdict[GroupKind, int] = defaultdict(int)
    for index, group in best:
        per_group[group] += problem.classes[index].count
    if not problem.fits(per_group):
        return None
    counts = {(index, group): problem.classes[index].count for index, group in best}
    return Solution(counts, "uncontended", compute_value(problem, counts))


def _find_best_group(values: Mapping[GroupKind, float]) -> GroupKind:
    """The group that is worth the most; of several, the first in order."""
    most = max(values.values())
    return min([group for group, value in values.items() if value == most])


def choose_ranked(problem: Problem) -> Solution | None:
    """The greedy plan where it is the best one: each request has one group, and those of a pool are equally wide."""
    in_use: set[GroupKind] = set()
    for item in problem.classes:
        if len(item.values) > 1:
            return None
        in_use.update(item.values)
    if len({group.pool for group in in_use}) < len(in_use):
        return None
    counts = complete(problem, {})
    return Solution(counts, "ranked", compute_value(problem, counts))


def plan_greedily(problem: Problem, why: str = "") -> Solution:
    """Required classes, then by best value, then in their order; each request takes the best group that still fits.

    `why` says why this is the plan, and not the solver's.
    """
    return Solution(complete(problem, {}), "greedy", compute_upper_bound(problem), why)


def complete(problem: Problem, counts: GroupCounts) -> GroupCounts:
    """A feasible choice with every request added that still fits, as `plan_greedily` does."""
    filled = Counter(dict(counts))
    served: Counter[int] = Counter()
    room = _Room(problem)
    for (index, group), n in counts.items():
        served[index] += room.take(group, n)
    if not room.open:
        return filled
    ranked = sorted(
        (index for index, item in enumerate(problem.classes) if item.values and served[index] < item.count),
        key=lambda index: (not problem.classes[index].required, -max(problem.classes[index].values.values())),
    )
    for index in ranked:
        if not room.open:
            break
        item = problem.classes[index]
        left = item.count - served[index]
        for group in _sort_by_value(item.values):
            if not left:
                break
            if group in room.open and (taken := room.take(group, left)):
                filled[index, group] += taken
                left -= taken
    return filled


def _sort_by_value(values: Mapping[GroupKind, float]) -> Sequence[GroupKind]:
    return sorted(values, key=lambda group: (-values[group], group))


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
    if len(problem.idle) == 1:
        indices = tuple(index for index, item in enumerate(problem.classes) if item.values)
        return [_make_part(problem, indices)] if indices else []
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
    return [_make_part(problem, indices) for indices in grouped.values()]


def _make_part(problem: Problem, indices: Sequence[int]) -> ProblemPart:
    classes = tuple([problem.classes[index] for index in indices])
    return ProblemPart(replace(problem, classes=classes), tuple(indices))


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
