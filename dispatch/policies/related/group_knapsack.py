"""The group knapsack: one option of each group, the widths within a capacity, the sum of values largest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class GroupKnapsack:
    """Dynamic programming over groups of (width, value) options (TetriServe, Algorithm 1; GenServe, Algorithm 1,
    stage 2). O(options x capacity) time. A group that may go without has an option of width 0."""

    def __init__(self, groups: Sequence[Sequence[tuple[int, float]]], capacity: int) -> None:
        self._groups = groups
        self._chosen: list[np.ndarray[tuple[int, ...], np.dtype[np.intp]]] = []
        totals = np.full(capacity + 1, -np.inf)
        totals[0] = 0.0
        for options in groups:
            sums = np.full((len(options), capacity + 1), -np.inf)
            for row, (width, value) in enumerate(options):
                if width <= capacity:
                    sums[row, width:] = totals[: capacity + 1 - width] + value
            self._chosen.append(sums.argmax(axis=0))
            totals = sums.max(axis=0)
        self.totals: list[float] = totals.tolist()
        """The largest sum of values for each width that is used exactly; minus infinity where none uses it."""

    @property
    def best_width(self) -> int:
        """The smallest width with the largest sum."""
        return self.totals.index(max(self.totals))

    def list_choices(self, width: int) -> list[int]:
        """The index of each group's option in a best selection that uses exactly this width."""
        picked: list[int] = []
        for options, chosen in zip(reversed(self._groups), reversed(self._chosen), strict=True):
            option = int(chosen[width])
            picked.append(option)
            width -= options[option][0]
        return picked[::-1]
