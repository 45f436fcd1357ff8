"""Tells of a plan's denoising steps a few times a second: a message costs more than a step of a small model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tridentserve.engine.live.messages import ProgressNote

PERIOD_S = 0.2


class StepTeller:
    """The steps of one plan, on its leader. Lives in the worker's event loop."""

    def __init__(self, tell: Callable[[ProgressNote], None], period_s: float = PERIOD_S) -> None:
        """`tell` gets the first step at once, and the others together, `period_s` after the note before or later."""
        self._tell = tell
        self._period_s = period_s
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[str, int]] = []
        self._timer: asyncio.TimerHandle | None = None

    def note_step(self, request_id: str, steps_done: int) -> None:
        """A step has been done. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._add, request_id, steps_done)

    def flush(self) -> None:
        """Tell of all that has been noted."""
        if self._waiting:
            self._tell(ProgressNote(tuple(self._waiting)))
            self._waiting.clear()

    def close(self) -> None:
        """The plan has ended: tell of the rest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.flush()

    def _add(self, request_id: str, steps_done: int) -> None:
        self._waiting.append((request_id, steps_done))
        if self._timer is None:
            self._loop.call_soon(self.flush)  # the same step of the other members comes with it
            self._timer = self._loop.call_later(self._period_s, self._end_period)

    def _end_period(self) -> None:
        """Steps that have come meanwhile begin the next period."""
        self._timer = self._loop.call_later(self._period_s, self._end_period) if self._waiting else None
        self.flush()
