"""What is to happen when: a heap of timed calls, and the simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import ParamSpec

_Arguments = ParamSpec("_Arguments")


class Agenda:
    """Calls in order of time; calls due at the same time in the order in which they were entered."""

    __slots__ = ("_entered", "_heap", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._entered = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(
        self, time_s: float, action: Callable[_Arguments, None], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> None:
        """Call `action(*args)` at `time_s`, which must not be NaN; a time that has passed is now."""
        self._entered += 1
        entry = (max(time_s, self.now_s), self._entered, lambda: action(*args, **kwargs))
        heapq.heappush(self._heap, entry)

    def run(self, end_s: float) -> None:
        """Make the calls, and those that they enter, up to and at `end_s`."""
        heap = self._heap
        while heap and heap[0][0] <= end_s:
            self.now_s, _, call = heapq.heappop(heap)
            call()
