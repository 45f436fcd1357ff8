"""The jobs of `POST /v1/videos` as clients use them: submitted, looked up, cancelled and fetched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployments.backend import Backend
from deployments.config.videos import VideosArgs
from deployments.openai_errors import describe_error
from deployments.videos.retention import VideoRetention
from deployments.videos.storage import VideoStorage
from deployments.videos.store import VideoStore
from deployments.videos.store_thread import StoreThread, translate_disk_errors
from deployments.videos.video_job import VideoJob
from deployments.videos.view import describe_job
from deployments.videos.worker import VideoWorker
from tridentserve.byte_sizes import MIB
from tridentserve.errors import RequestCancelledError, RequestNotFoundError
from tridentserve.requests import GenerationInputs, RequestSpec

DATABASE = "jobs.sqlite3"


class VideoJobs:
    """A `deployments.backend.VideoBackend`, which also works the jobs off. Start it in a running event loop."""

    def __init__(
        self, backend: Backend, options: VideosArgs, data_dir: Path, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises `ConfigError` when `data_dir` holds another program's database. `clock` gives seconds of the Unix
        clock."""
        self._options = options
        self._clock = clock
        self._store = StoreThread(VideoStore(data_dir / DATABASE))
        self.storage = VideoStorage(choose_storage_url(options, data_dir))
        self._retention = VideoRetention(self._store, self.storage, options.max_results_mb, clock)
        self._worker = VideoWorker(backend, options, self._store, self._retention, clock)
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to work off jobs, those of earlier processes included, and to remove old files."""
        self._worker.start()
        sweeping = self._retention.keep_sweeping(self._options.retention_s)
        self._sweeper = asyncio.get_running_loop().create_task(sweeping)

    async def stop(self) -> None:
        """Give all jobs back, so that the next process resumes them at once."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._worker.stop()
        if self._sweeper is not None:
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self._store.close()

    @property
    def is_healthy(self) -> bool:
        """False when jobs are not worked off any more."""
        return self._worker.is_healthy

    async def submit(self, spec: RequestSpec, inputs: GenerationInputs, priority: int) -> dict[str, Any]:
        most, most_bytes, now_s = self._options.max_unfinished, self._options.max_results_mb * MIB, self._clock()
        spec = replace(spec, waited_s=0.0)  # the request's times, like the job's `queue_s`, count from the scheduler on
        inputs = replace(inputs, id_drawn=False)  # a job is asked for again, under its id, when this process has ended
        job = await self._store.run_for_client(
            lambda store: store.submit(spec, inputs, priority, now_s, most, most_bytes)
        )
        self._worker.wake()
        return self._describe(job)

    async def get(self, job_id: str) -> dict[str, Any]:
        return self._describe(await self._find(job_id))

    async def list_page(self, after: str | None, limit: int, newest_first: bool) -> tuple[list[dict[str, Any]], bool]:
        jobs = await self._store.run_for_client(lambda store: store.list_page(after, limit + 1, newest_first))
        return [self._describe(job) for job in jobs[:limit]], len(jobs) > limit

    async def delete(self, job_id: str) -> None:
        if not await self.cancel(job_id):
            job = await self._find(job_id)
            with translate_disk_errors():
                await self._retention.discard(job)

    async def cancel(self, job_id: str) -> bool:
        job = await self._find(job_id)
        error = describe_error(RequestCancelledError("the video was deleted before it was finished"))
        now_s = self._clock()
        if not await self._store.run_for_client(lambda store: store.fail(None, job.number, error, now_s)):
            return False
        self._worker.stop_run(job.number)
        return True

    async def find_local_file(self, job_id: str, index: int) -> Path | None:
        return await asyncio.to_thread(self.storage.find_local_file, await self.find_file_name(job_id, index), index)

    async def find_file_name(self, job_id: str, index: int) -> str:
        """The name of the files of a completed job that has this video. Raises `RequestNotFoundError`."""
        job = await self._find(job_id)
        if job.state != "completed" or index >= job.spec.num_outputs:
            raise RequestNotFoundError("this video has no such content, or not yet")
        return job.file_name

    async def read_content(self, job_id: str, index: int) -> bytes:
        name = await self.find_file_name(job_id, index)
        try:
            return await asyncio.to_thread(self.storage.read, name, index)
        except FileNotFoundError:
            raise RequestNotFoundError("the file of this video has been removed") from None

    async def _find(self, job_id: str) -> VideoJob:
        job = await self._store.run_for_client(lambda store: store.find(job_id))
        if job is None:
            raise RequestNotFoundError("there is no video with this id, or it has been removed")
        return job

    def _describe(self, job: VideoJob) -> dict[str, Any]:
        prospects = self._worker.find_prospects(job)
        return describe_job(job, self._worker.count_steps(job), self._options.retention_s, prospects)


def choose_storage_url(options: VideosArgs, data_dir: Path) -> str:
    """The directory or the fsspec URL that holds the files of videos."""
    return options.results_url or str(data_dir / "results")
