"""A heap of timed calls, and the simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, TypeVarTuple

_Arguments = TypeVarTuple("_Arguments")


class Agenda:
    """Calls in order of time; calls due at the same time in the order in which they were entered."""

    __slots__ = ("_entered", "_heap", "_num_ticks", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._entered = 0
        self._num_ticks = 0

    @property
    def has_work(self) -> bool:
        """True when something is due that is no tick: a scheduler enters ticks for as long as a request waits."""
        return len(self._heap) > self._num_ticks

    @property
    def is_empty(self) -> bool:
        """True when nothing is due, no tick either."""
        return not self._heap

    def call_at(self, time_s: float, action: Callable[[*_Arguments], None], *args: *_Arguments) -> None:
        """Call `action(*args)` at `time_s`, which must not be NaN; a time that has passed is now."""
        self._entered += 1
        if time_s < self.now_s:
            time_s = self.now_s
        heapq.heappush(self._heap, (time_s, self._entered, action, args))

    def tick_at(self, time_s: float, tick: Callable[[int], None], number: int) -> None:
        """Call `tick(number)`, the tick of a scheduler, at `time_s`."""
        self._num_ticks += 1
        self.call_at(time_s, self._tick, tick, number)

    def _tick(self, tick: Callable[[int], None], number: int) -> None:
        self._num_ticks -= 1
        tick(number)

    def run(self, end_s: float) -> None:
        """Make the calls, and those that they enter, up to and at `end_s`, which the time is then if some are left."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end_s:
            self.now_s, _, action, args = pop(heap)
            action(*args)
        if heap:
            self.now_s = end_s
