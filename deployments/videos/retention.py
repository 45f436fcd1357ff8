"""The MP4 files of video jobs over time: written, given up, and swept when no job needs them any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from deployments.videos.storage import VideoStorage
from deployments.videos.store_thread import StoreThread
from deployments.videos.video_job import VideoJob
from tridentserve.byte_sizes import MIB
from tridentserve.errors import VideoStorageError

logger = logging.getLogger(__name__)

_LEFT_OVER_S = 3600.0
"""No process writes the files of one job for longer: a process that began before has died."""
_SWEEP_S = 30.0
"""Seconds between two sweeps."""


class VideoRetention:
    """Writes and removes the files of jobs.

    The store notes files before they are written, until their job is completed. So they are found whatever becomes of
    the job or of this process, and no file is ever removed that was not written here.
    """

    def __init__(self, store: StoreThread, storage: VideoStorage, max_mb: int, clock: Callable[[], float]) -> None:
        """All files together have at most `max_mb` MiB. `clock` gives seconds of the Unix clock."""
        self._store = store
        self._storage = storage
        self._max_mb = max_mb
        self._clock = clock

    async def write(self, job: VideoJob, videos: Sequence[bytes]) -> int:
        """Write the videos of a job. Returns their size in bytes. Raises `VideoStorageError`."""
        num_bytes = sum(len(video) for video in videos)
        if num_bytes > self._max_mb * MIB:
            raise VideoStorageError(f"the video has more than videos.max_results_mb ({self._max_mb} MiB)")
        await self._store.run(lambda store: store.begin_files(job, self._clock()))
        try:
            await asyncio.to_thread(self._storage.write, job.file_name, videos)
        except Exception as error:  # file systems raise classes of their own
            logger.exception("the files of video job %s cannot be kept", job.job_id)
            raise VideoStorageError(f"the video was made, but cannot be kept ({type(error).__name__})") from None
        return num_bytes

    async def drop_unless_wanted(self, job: VideoJob) -> None:
        """Remove the files of a job that this process could not complete, unless another process has the job now."""
        now = await self._store.run(lambda store: store.find(job.job_id))
        if now is None or now.number != job.number or now.state == "failed":
            await self._drop(job.number, job.file_name, job.spec.num_outputs)

    async def discard(self, job: VideoJob) -> None:
        """Forget a job that has ended, and remove its files."""
        if job.state == "completed":
            await asyncio.to_thread(self._storage.delete, job.file_name, job.spec.num_outputs)
        await self._store.run(lambda store: store.delete(job.number))

    async def make_room(self) -> None:
        """Discard the oldest completed jobs until the files of all others have at most `max_mb` MiB."""
        for job in await self._store.run(lambda store: store.list_surplus(self._max_mb * MIB)):
            await self.discard(job)

    async def sweep(self, retention_s: float) -> None:
        """Discard jobs that ended more than `retention_s` seconds ago or are too many, and what dead processes left."""
        now_s = self._clock()
        for job in await self._store.run(lambda store: store.list_ended_before(now_s - retention_s)):
            await self.discard(job)
        await self.make_room()
        for files in await self._store.run(lambda store: store.list_unkept_files(now_s - _LEFT_OVER_S)):
            await self._drop(files.number, files.name, files.count)
        await asyncio.to_thread(self._storage.sweep_parts, now_s - _LEFT_OVER_S)

    async def keep_sweeping(self, retention_s: float) -> None:
        """Sweep until the task is cancelled. File systems may be slow, so nothing else waits for it."""
        while True:
            try:
                await self.sweep(retention_s)
            except Exception:
                logger.exception("old video jobs cannot be removed: will try again")
            await asyncio.sleep(_SWEEP_S)

    async def _drop(self, number: int, name: str, count: int) -> None:
        await asyncio.to_thread(self._storage.delete, name, count)
        await self._store.run(lambda store: store.forget_files(number))
