"""The group knapsack: one option of each group, the widths within a capacity, the sum of values largest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class GroupKnapsack:
    """Dynamic programming over groups of (width, value) options (TetriServe, Algorithm 1; GenServe, Algorithm 1,
    stage 2). O(options x capacity) time. The first option of a group has width 0: it goes without."""

    def __init__(self, groups: Sequence[Sequence[tuple[int, float]]], capacity: int) -> None:
        self._groups = groups
        # Where an option is better than those of its group before it, for each width that is used exactly. To keep the
        # sums would be less work but eight times the memory, and to get that much can take longer than all of the work.
        self._better = np.empty((sum(map(len, groups)), capacity + 1), dtype=np.bool_)
        before, after, widened = (np.full(capacity + 1, -np.inf) for _ in range(3))
        before[0] = 0.0
        first = 0
        for options in groups:
            np.add(before, options[0][1], out=after)
            for row, (width, value) in enumerate(options[1:], start=first + 1):
                if width <= capacity:
                    best, sums = after[width:], widened[width:]
                    np.add(before[: capacity + 1 - width], value, out=sums)
                    np.greater(sums, best, out=self._better[row, width:])
                    np.maximum(sums, best, out=best)
            first += len(options)
            before, after = after, before
        self.totals: list[float] = before.tolist()
        """The largest sum of values for each width that is used exactly; minus infinity where none uses it."""

    @property
    def best_width(self) -> int:
        """The smallest width with the largest sum."""
        return self.totals.index(max(self.totals))

    def list_choices(self, width: int) -> list[int]:
        """The index of each group's option in a best selection that uses exactly this width."""
        picked: list[int] = []
        first = len(self._better)
        for options in reversed(self._groups):
            first -= len(options)
            option = len(options) - 1
            while option and not (options[option][0] <= width and self._better.item(first + option, width)):
                option -= 1
            picked.append(option)
            width -= options[option][0]
        return picked[::-1]


def choose_best(groups: Sequence[Sequence[tuple[int, float]]], capacity: int) -> list[int]:
    """The index of each group's option in a best selection of the smallest width. The options of a group are in the
    order of their widths."""
    best = [max(range(len(options)), key=lambda index: options[index][1]) for options in groups]
    if sum(options[index][0] for options, index in zip(groups, best, strict=True)) <= capacity:
        return best  # each group's own best, as there is room for all of them
    knapsack = GroupKnapsack(groups, capacity)
    return knapsack.list_choices(knapsack.best_width)
