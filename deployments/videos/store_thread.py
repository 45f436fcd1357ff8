"""The store of video jobs as callers in an event loop use it: through one thread, one call at a time."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from deployments.videos.store import VideoStore
from tridentserve.errors import OverloadedError, VideoStorageError

T = TypeVar("T")

_BUSY_CODES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_DISK_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)


class StoreThread:
    """Makes all calls of a store in one thread, because they block for as long as the disk takes."""

    def __init__(self, store: VideoStore) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="video-store")

    async def run(self, call: Callable[[VideoStore], T]) -> T:
        """The result of `call`, which gets the store."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, self.store)

    async def run_for_client(self, call: Callable[[VideoStore], T]) -> T:
        """Do the same as `run`. Raises `VideoStorageError` or `OverloadedError` for the errors of SQLite's disk."""
        with translate_disk_errors():
            return await self.run(call)

    async def close(self) -> None:
        """Close the store after the calls that are under way."""
        await self.run(VideoStore.close)
        self._thread.shutdown()


@contextmanager
def translate_disk_errors() -> Iterator[None]:
    """Raises an error for clients where SQLite's disk fails or another process holds the store."""
    try:
        yield
    except sqlite3.OperationalError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the upper bits hold details
        if code in _BUSY_CODES:
            raise OverloadedError("the store of video jobs is busy, try again later") from error
        if code not in _DISK_CODES:
            raise
        raise VideoStorageError(
            f"the store of video jobs cannot be used ({error}): check the disk of videos.data_dir"
        ) from error
