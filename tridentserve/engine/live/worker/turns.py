"""Runs calls in the order of their numbers, whatever the order in which they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Numbers start at 0 and leave no gap. Actor calls may overtake one another; plans must not, or groups deadlock."""

    def __init__(self) -> None:
        self._next = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def wait_for(self, number: int) -> AsyncIterator[None]:
        """Wait until all lower numbers have had their turn."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._next == number)
        try:
            yield
        finally:
            async with self._changed:
                self._next += 1
                self._changed.notify_all()
