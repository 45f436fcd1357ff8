"""One tick's assignment problem, free of requests and workers: what the ILP, the greedy plan and the tests share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """`degree` idle workers of one pool, all in one node."""

    pool: int
    degree: int


@dataclass(frozen=True, slots=True)
class RequestClass:
    """`count` identical requests and what each slot is worth to one of them (all values are above 0).

    `required`: all of them must have a slot, whatever that costs others. Those of a problem have to fit together."""

    count: int
    values: Mapping[Slot, float]
    required: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """Choose slots for requests so that the sum of values is largest. `idle[pool]` holds the idle workers per node."""

    classes: tuple[RequestClass, ...]
    idle: tuple[tuple[int, ...], ...]

    def capacity(self, pool: int, degree: int) -> int:
        """How many slots of this degree the idle workers of a pool form: no slot crosses a node."""
        return sum(idle // degree for idle in self.idle[pool])

    def fits(self, slots: Mapping[Slot, int]) -> bool:
        """Whether so many slots can be formed at once.

        Degrees are powers of two, so they nest: a choice fits exactly when, for every degree j in use, the workers in
        slots of j or wider are no more than the nodes offer in blocks of j.
        """
        in_use = [(slot, n) for slot, n in slots.items() if n > 0]
        return all(
            sum(wide.degree * n for wide, n in in_use if wide.pool == slot.pool and wide.degree >= slot.degree)
            <= slot.degree * self.capacity(slot.pool, slot.degree)
            for slot, _ in in_use
        )


# `uncontended`: every request has its best slot, so no solver was asked. `ilp`: proved optimal. `incumbent`: the
# solver's best at its time limit. `greedy`: the solver gave nothing.
Method = Literal["uncontended", "ilp", "incumbent", "greedy"]


@dataclass(frozen=True, slots=True)
class Solution:
    """How many requests of each class get each slot, how that was found, and what went wrong on the way if anything."""

    counts: Mapping[tuple[int, Slot], int]
    method: Method
    failure: str = ""

    def value(self, problem: Problem) -> float:
        """The objective."""
        return sum(n * problem.classes[index].values[slot] for (index, slot), n in self.counts.items())


def is_feasible(problem: Problem, counts: Mapping[tuple[int, Slot], int]) -> bool:
    """Whether counts keep every limit: each request at most once, those required once (C1), idle workers and nodes
    (C2)."""
    per_class: Counter[int] = Counter()
    per_slot: Counter[Slot] = Counter()
    for (index, slot), n in counts.items():
        if n < 0 or slot not in problem.classes[index].values:
            return False
        per_class[index] += n
        per_slot[slot] += n
    return problem.fits(per_slot) and all(
        per_class[index] == item.count if item.required else per_class[index] <= item.count
        for index, item in enumerate(problem.classes)
    )


def best_slots(problem: Problem) -> Solution | None:
    """Every request at its best slot, if those fit at once: then nothing can be better, and no solver is needed."""
    counts: Counter[tuple[int, Slot]] = Counter()
    per_slot: Counter[Slot] = Counter()
    for index, item in enumerate(problem.classes):
        if item.values:
            slot = max(sorted(item.values), key=item.values.__getitem__)
            counts[index, slot] += item.count
            per_slot[slot] += item.count
    return Solution(counts, "uncontended") if problem.fits(per_slot) else None


def greedy(problem: Problem, failure: str = "") -> Solution:
    """Required classes, then by best value, then in their order; each request takes the best slot that still fits.

    `failure` says why the solver's answer was not taken.
    """
    counts: Counter[tuple[int, Slot]] = Counter()
    per_slot: Counter[Slot] = Counter()
    ranked = sorted(
        (index for index, item in enumerate(problem.classes) if item.values),
        key=lambda index: (not problem.classes[index].required, -max(problem.classes[index].values.values())),
    )
    for index in ranked:
        left = problem.classes[index].count
        for slot in _by_value(problem.classes[index].values):
            taken = _most(problem, per_slot, slot, left)
            if taken:
                counts[index, slot] += taken
                per_slot[slot] += taken
                left -= taken
    return Solution(counts, "greedy", failure)


def _by_value(values: Mapping[Slot, float]) -> Sequence[Slot]:
    return sorted(values, key=lambda slot: (-values[slot], slot))


def _most(problem: Problem, per_slot: Counter[Slot], slot: Slot, limit: int) -> int:
    """How many more of a slot fit beside those taken, at most `limit`."""
    low, high = 0, min(limit, problem.capacity(slot.pool, slot.degree))
    while low < high:
        middle = (low + high + 1) // 2
        if problem.fits(per_slot + Counter({slot: middle})):
            low = middle
        else:
            high = middle - 1
    return low
