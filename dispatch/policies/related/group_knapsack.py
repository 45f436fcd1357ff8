"""The group knapsack: one option of each group, the widths within a capacity, the sum of values largest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


class GroupKnapsack:
    """Dynamic programming over groups of (width, value) options (TetriServe, Algorithm 1; GenServe, Algorithm 1,
    stage 2). O(options x capacity) time. The first option of a group has width 0: it goes without."""

    def __init__(self, groups: Sequence[Sequence[tuple[int, float]]], capacity: int) -> None:
        self._groups = groups
        # The largest sum of the first groups, one more in each row, for each width that is used exactly.
        self._sums = np.empty((len(groups) + 1, capacity + 1))
        self._sums[0] = -np.inf
        self._sums[0, 0] = 0.0
        widened = np.empty(capacity + 1)
        for row, ((_, without), *options) in enumerate(groups):
            before, after = self._sums[row], self._sums[row + 1]
            np.add(before, without, out=after)
            for width, value in options:
                if width <= capacity:
                    best, sums = after[width:], widened[width:]
                    np.add(before[: capacity + 1 - width], value, out=sums)
                    np.maximum(best, sums, out=best)
        self.totals: list[float] = self._sums[-1].tolist()
        """The largest sum of values for each width that is used exactly; minus infinity where none uses it."""

    @property
    def best_width(self) -> int:
        """The smallest width with the largest sum."""
        return self.totals.index(max(self.totals))

    def list_choices(self, width: int) -> list[int]:
        """The index of each group's option in a best selection that uses exactly this width."""
        picked: list[int] = []
        for row, options in reversed(list(enumerate(self._groups))):
            sums = [
                self._sums.item(row, width - needed) + value if needed <= width else -math.inf
                for needed, value in options
            ]
            option = sums.index(max(sums))
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
