"""Threads beside the one that computes. One that uses a GPU does so on a stream of its own, and waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from tridentserve.device.compute_device import WorkMark


class StreamMaker(Protocol):
    """A device with streams."""

    def enter_thread(self) -> None: ...

    def make_stream(self) -> torch.cuda.Stream: ...


class SideThread:
    """See `CopyCall`. Functions are called one after another, and only this thread waits for them."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def __call__(self, copy: Callable[..., Any], *args: Any, after: WorkMark | None = None) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._copy, copy, args, after)

    def _copy(self, copy: Callable[..., Any], args: tuple[Any, ...], after: WorkMark | None) -> Any:
        return copy(*args)


class CopyThread(SideThread):
    """Waits for what it gives to a GPU: neither the event loop nor what computes does."""

    def __init__(self, device: StreamMaker, name: str) -> None:
        super().__init__(name)
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def _copy(self, copy: Callable[..., Any], args: tuple[Any, ...], after: WorkMark | None) -> Any:
        if self._stream is None:
            self._device.enter_thread()
            self._stream = self._device.make_stream()
        with torch.cuda.stream(self._stream):
            try:
                if after is not None:
                    after.wait()
                return copy(*args)
            finally:  # also what was begun before an error
                self._stream.synchronize()
