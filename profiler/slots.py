"""Counts per slot of time, and what chance explains of the difference between two times."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class SlotCounter(Generic[Key]):
    """Two whole numbers per key and slot of time, kept for as long as the longest window. To count costs O(1)."""

    def __init__(self, longest_s: float, slot_s: float) -> None:
        self.slot_s = slot_s
        self._kept = math.ceil(longest_s / slot_s) + 1
        self._slots: deque[tuple[int, dict[Key, tuple[int, int]]]] = deque()

    def add(self, key: Key, first: int, second: int, now_s: float) -> None:
        """Count this in the slot of now, or in the last one that there is if that is later."""
        number = math.floor(now_s / self.slot_s)
        if not self._slots or self._slots[-1][0] < number:
            self._slots.append((number, {}))
            while self._slots[0][0] <= number - self._kept:
                self._slots.popleft()
        counts = self._slots[-1][1]
        before = counts.get(key, (0, 0))
        counts[key] = (before[0] + first, before[1] + second)

    def sum_since(self, start_slot: int, end_slot: int | None = None) -> dict[Key, tuple[int, int]]:
        """The sums of the slots from `start_slot` on, and before `end_slot`, by key."""
        sums: dict[Key, tuple[int, int]] = {}
        for number, counts in reversed(self._slots):
            if number < start_slot:
                break
            if end_slot is None or number < end_slot:
                for key, (first, second) in counts.items():
                    before = sums.get(key, (0, 0))
                    sums[key] = (before[0] + first, before[1] + second)
        return sums


def compute_difference_error(squares: float, one_s: float, other_s: float) -> float:
    """The standard error of the difference of two rates, seen for so long each, if arrivals are independent and their
    rate is the same: `squares` is the sum of the squares of all that came."""
    return math.sqrt(squares / (one_s * other_s))
