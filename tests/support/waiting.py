"""Waits for what comes sooner or later. The time until then says more of the machine than of the code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable

# Far longer than anything takes, also on one busy core: it only keeps a test that hangs from hanging without end.
PATIENCE_S = 600.0
# Ray gives its processes 30 s to start, which no setting changes; on one busy core that may be too little.
RAY_TOO_SLOW = "The current node timed out during startup"


def wait_until(
    condition: Callable[[], bool], what: str = "", every_s: float = 0.05, tell: Callable[[], str] = str
) -> None:
    """Return once the condition holds. `what` names the condition in the error when it never does; `tell` adds what
    helps to find out why."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not in {PATIENCE_S:.0f} s: {what or condition}\n{tell()}"
        time.sleep(every_s)


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str = "", every_s: float = 0.005) -> None:
    """Do what `wait_until` does, while the event loop runs. The condition may be awaited."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (await holds if isawaitable(holds := condition()) else holds):
        assert time.monotonic() < deadline_s, f"not in {PATIENCE_S:.0f} s: {what or condition}"
        await asyncio.sleep(every_s)
