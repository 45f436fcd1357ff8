"""Bounds on input images: how many wait to be decoded, and how many bytes of them are held at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

from tridentserve.byte_sizes import MIB
from tridentserve.errors import OverloadedError

MAX_HELD_BYTES = 1024 * MIB
"""Bytes of input images that the requests of one scheduler hold."""
MAX_JOBS_BYTES = 256 * MIB
"""Bytes of input images that the video jobs hold which are given to a scheduler at once."""
T = TypeVar("T")


class DecodingThreads:
    """Decodes images in threads, a few at a time, because each may take a second and some hundred MB."""

    def __init__(self, max_threads: int = 2, max_waiting: int = 32) -> None:
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="input-image")
        self._most = max_threads + max_waiting
        self._unfinished = 0
        self._lock = Lock()  # a future ends in one of the threads, or in the event loop when it is cancelled

    async def run(self, decode: Callable[[], T]) -> T:
        """The result of `decode`, or what it raises. Raises `OverloadedError` when too many images wait already."""
        with self._lock:
            if self._unfinished >= self._most:
                raise OverloadedError(f"{self._most} images are to be decoded already, try again later")
            self._unfinished += 1
        future = self._threads.submit(decode)
        future.add_done_callback(self._count_end)
        return await asyncio.wrap_future(future)

    def _count_end(self, _: Future[Any]) -> None:
        with self._lock:
            self._unfinished -= 1


class ImageBudget:
    """Bounds the bytes of images that are held at once. The images of one request always have room. It is used in one
    thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0

    def has_room(self, images: Sequence[bytes]) -> bool:
        """True if the images can be held now; none always can."""
        num_bytes = sum(map(len, images))
        return not num_bytes or not self._held_bytes or self._held_bytes + num_bytes <= self._max_bytes

    @contextmanager
    def hold(self, images: Sequence[bytes]) -> Iterator[None]:
        """Count the images until the end of the context."""
        num_bytes = sum(map(len, images))
        self._held_bytes += num_bytes
        try:
            yield
        finally:
            self._held_bytes -= num_bytes
