"""The calls of the scheduler that clients wait for: each can be ended from another process by its id."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

_MAX_ENDED_EARLY = 1024


class OpenCalls:
    """Ends the calls whose callers have left, also where `ray.cancel` does not: Ray promises no more than an attempt,
    and a request that nobody waits for would keep its workers until its last step.

    For one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[object]] = {}
        # A call may come in after its end (hence the names) or have ended by itself (hence the bound).
        self._ended_early: deque[str] = deque(maxlen=_MAX_ENDED_EARLY)

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def hold(self, call_id: str) -> Iterator[None]:
        """The block is the call: `end` cancels the task that is in it. Raises `CancelledError` for a call whose caller
        has left already."""
        if call_id in self._ended_early:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        assert task is not None
        self._tasks[call_id] = task
        try:
            yield
        finally:
            del self._tasks[call_id]

    def end(self, call_id: str) -> None:
        """The caller has left. Without effect on a call that has ended."""
        if (task := self._tasks.get(call_id)) is not None:
            task.cancel()
        else:
            self._ended_early.append(call_id)
