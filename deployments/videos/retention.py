"""The files of video jobs beside their store: written, given up, and swept when nobody will have them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from deployments.videos.storage import VideoResults
from deployments.videos.store import VideoJob, VideoStore
from tridentserve.errors import VideoStorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIB = 2**20
# Nobody writes the files of one job for so long: who began has died.
_LEFT_OVER_S = 3600.0


class Stored(Protocol):
    """Makes a call of the store in its thread."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]: ...


class VideoFiles:
    """Files are noted in the store before they are written, until their job is completed. So whatever becomes of the
    job or of this process they are found, and nothing is ever removed that was not written here."""

    def __init__(
        self, store: VideoStore, stored: Stored, results: VideoResults, max_mb: int, clock: Callable[[], float]
    ) -> None:
        """All files together have at most `max_mb` MiB. `clock`: seconds of the Unix clock."""
        self._store = store
        self._stored = stored
        self._results = results
        self._max_mb = max_mb
        self._clock = clock

    async def write(self, job: VideoJob, videos: Sequence[bytes]) -> int:
        """Returns how many bytes they have. Raises `VideoStorageError`."""
        num_bytes = sum(len(video) for video in videos)
        if num_bytes > self._max_mb * MIB:
            raise VideoStorageError(f"the video has more than videos.max_results_mb ({self._max_mb} MiB)")
        await self._stored(lambda: self._store.begin_files(job, self._clock()))
        try:
            await asyncio.to_thread(self._results.write, job.file_name, videos)
        except Exception as error:  # file systems raise classes of their own
            logger.exception("the files of video job %s cannot be kept", job.job_id)
            raise VideoStorageError(f"the video was made, but cannot be kept ({type(error).__name__})") from None
        return num_bytes

    async def drop_unless_wanted(self, job: VideoJob) -> None:
        """Remove what was written for a job that this process could not complete, unless another one has it now."""
        now = await self._stored(lambda: self._store.find(job.job_id))
        if now is None or now.number != job.number or now.state == "failed":
            await self._drop(job.number, job.file_name, job.spec.num_outputs)

    async def discard(self, job: VideoJob) -> None:
        """Forget a job that has ended, and remove its files."""
        if job.state == "completed":
            await asyncio.to_thread(self._results.delete, job.file_name, job.spec.num_outputs)
        await self._stored(lambda: self._store.delete(job.number))

    async def make_room(self) -> None:
        for job in await self._stored(lambda: self._store.surplus(self._max_mb * MIB)):
            await self.discard(job)

    async def sweep(self, retention_s: float) -> None:
        """Drop what is too old, or too much, or was left by processes that died."""
        now_s = self._clock()
        for job in await self._stored(lambda: self._store.ended_before(now_s - retention_s)):
            await self.discard(job)
        await self.make_room()
        for files in await self._stored(lambda: self._store.unkept_files(now_s - _LEFT_OVER_S)):
            await self._drop(files.number, files.name, files.count)
        await asyncio.to_thread(self._results.sweep_parts, now_s - _LEFT_OVER_S)

    async def _drop(self, number: int, name: str, count: int) -> None:
        await asyncio.to_thread(self._results.delete, name, count)
        await self._stored(lambda: self._store.forget_files(number))
