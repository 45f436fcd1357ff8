"""Bounds on what pictures take: how many wait to be decoded, and how many bytes of them are held at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

from tridentserve.errors import OverloadedError

_MIB = 2**20
# Of the requests that a scheduler has; of the video jobs that are given to one at once.
MAX_HELD_BYTES = 1024 * _MIB
MAX_JOBS_BYTES = 256 * _MIB
T = TypeVar("T")


class DecodingThreads:
    """Decodes pictures beside the event loop, a few at a time: each may take a second, and some hundred MB."""

    def __init__(self, max_threads: int = 2, max_waiting: int = 32) -> None:
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="source-picture")
        self._most = max_threads + max_waiting
        self._unfinished = 0
        self._lock = Lock()  # a future ends in one of the threads, or in the event loop when it is cancelled

    async def run(self, decode: Callable[[], T]) -> T:
        """What `decode` returns or raises. Raises `OverloadedError` when too many wait already."""
        with self._lock:
            if self._unfinished >= self._most:
                raise OverloadedError(f"{self._most} pictures are to be decoded already, try again later")
            self._unfinished += 1
        future = self._threads.submit(decode)
        future.add_done_callback(self._ended)
        return await asyncio.wrap_future(future)

    def _ended(self, _: Future[Any]) -> None:
        with self._lock:
            self._unfinished -= 1


class PictureRoom:
    """How many bytes of pictures are held at once. One picture has room in any case, however large. In one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0

    def has_room(self, picture: bytes | None) -> bool:
        return not picture or not self._held_bytes or self._held_bytes + len(picture) <= self._max_bytes

    @contextmanager
    def holding(self, picture: bytes | None) -> Iterator[None]:
        """The picture counts until the end of the context."""
        num_bytes = len(picture or b"")
        self._held_bytes += num_bytes
        try:
            yield
        finally:
            self._held_bytes -= num_bytes
