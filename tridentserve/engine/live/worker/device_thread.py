"""The one thread of a worker in which its device is used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class DeviceThread:
    """Runs functions one after another in a thread of its own, so that the worker's event loop stays free."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    async def __call__(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function and wait for its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args))

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        """Run a function when the thread is free; nobody waits for it."""
        self._pool.submit(function, *args)
