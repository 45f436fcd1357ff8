"""Works off video jobs: leases them from the store, has the service make them, and keeps their files.

Several processes may do so over one store. All calls of the store are made in one thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from deployments.backend import Backend, closing
from deployments.config.videos import VideosArgs
from deployments.http.errors import body_of, openai_error
from deployments.http.plain_updates import to_plain
from deployments.schemas.image_limits import MAX_JOBS_BYTES
from deployments.videos.model_absence import REFUSALS, AwayModels
from deployments.videos.retention import MIB, VideoFiles
from deployments.videos.storage import VideoResults
from deployments.videos.store import VideoJob, VideoStore, client_error
from deployments.videos.view import video_view
from tridentserve.engine.live.updates import CompletedUpdate, FailedUpdate, ProgressUpdate
from tridentserve.errors import (
    OverloadedError,
    RequestCancelledError,
    RequestNotFoundError,
    TridentServeError,
    VideoStorageError,
    WorkerError,
)
from tridentserve.requests import GenerationInputs, RequestSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

DATABASE = "jobs.sqlite3"
# What is told of a completed job beside what the request says.
_TOLD = ("seed", "queue_s", "latency_s", "slo_s", "slo_met", "retries", "stage_durations", "timeline", "peak_memory_mb")
# Renewals before a lease runs out; how long a job waits that the service could not take, or whose model is away; how
# often old jobs are looked for.
_RENEWALS, _PAUSE_S, _AWAY_PAUSE_S, _SWEEP_S = 3.0, 1.0, 5.0, 30.0


@dataclass(slots=True)
class _Run:
    """A job of this process. `steps_done` of all its steps, `began` once the scheduler has taken it, `is_made` once
    there is a result."""

    job: VideoJob
    task: asyncio.Task[None] | None = None
    steps_done: int = 0
    began: bool = False
    is_made: bool = False

    def stop(self) -> None:
        """As nobody wants it any more. What is made is written to its end, by a thread that nothing stops, and removed
        then if it cannot be kept."""
        if self.task is not None and not self.is_made:
            self.task.cancel()


class VideoJobs:
    """The jobs of `POST /v1/videos`: a `deployments.video_backend.VideoBackend`. `start` it in a running event loop."""

    def __init__(
        self,
        backend: Backend,
        options: VideosArgs,
        data_dir: Path,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises `ConfigError` when `data_dir` holds something else's database. `clock`: seconds of the Unix clock."""
        self._backend = backend
        self._options = options
        self._clock = clock
        self._owner = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._store = VideoStore(data_dir / DATABASE)
        self.results = VideoResults(results_url(options, data_dir))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="video-store")
        self._files = VideoFiles(self._store, self._stored, self.results, options.max_results_mb, clock)
        self._away = AwayModels(clock)
        self._runs: dict[int, _Run] = {}
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._is_stopping = False

    async def start(self) -> None:
        """Begin to work, with what earlier processes left as soon as their leases have run out."""
        self._pump = asyncio.get_running_loop().create_task(self._work())
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def stop(self) -> None:
        """Give all jobs back, for the next process to go on with at once."""
        self._is_stopping = True
        tasks = [task for task in (self._pump, self._sweeper) if task is not None]
        for task in tasks:
            task.cancel()
        for run in self._runs.values():
            run.stop()
        tasks += [run.task for run in self._runs.values() if run.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        for number in self._runs:
            await self._stored(partial(self._store.release, self._owner, number, 0.0, counted=False))
        await self._stored(self._store.close)
        self._thread.shutdown()

    @property
    def healthy(self) -> bool:
        return self._pump is None or not self._pump.done()

    # What clients ask for.

    async def submit(self, spec: RequestSpec, inputs: GenerationInputs, priority: int) -> dict[str, Any]:
        most, most_bytes, now_s = self._options.max_unfinished, self._options.max_results_mb * MIB, self._clock()
        spec = replace(spec, waited_s=0.0)  # its times count from when the scheduler gets it, like the job's `queue_s`
        job = await self._asked(lambda: self._store.submit(spec, inputs, priority, now_s, most, most_bytes))
        self._wake.set()
        return self._view(job)

    async def get(self, job_id: str) -> dict[str, Any]:
        return self._view(await self._found(job_id))

    async def page(self, after: str | None, limit: int, newest_first: bool) -> tuple[list[dict[str, Any]], bool]:
        jobs = await self._asked(lambda: self._store.page(after, limit + 1, newest_first))
        return [self._view(job) for job in jobs[:limit]], len(jobs) > limit

    async def delete(self, job_id: str) -> None:
        if not await self.cancel(job_id):
            job = await self._found(job_id)
            with client_error():
                await self._files.discard(job)

    async def cancel(self, job_id: str) -> bool:
        job = await self._found(job_id)
        error = body_of(RequestCancelledError("the video was deleted before it was finished"))["error"]
        if not await self._asked(lambda: self._store.fail(None, job.number, error, self._clock())):
            return False
        if (run := self._runs.get(job.number)) is not None:
            run.stop()
        return True

    async def local_file(self, job_id: str, index: int) -> Path | None:
        return await asyncio.to_thread(self.results.local_file, await self.file_name(job_id, index), index)

    async def file_name(self, job_id: str, index: int) -> str:
        """Of a video of a completed job. Raises `RequestNotFoundError`."""
        job = await self._found(job_id)
        if job.state != "completed" or index >= job.spec.num_outputs:
            raise RequestNotFoundError("this video has no such content, or not yet")
        return job.file_name

    async def content(self, job_id: str, index: int) -> bytes:
        name = await self.file_name(job_id, index)
        try:
            return await asyncio.to_thread(self.results.read, name, index)
        except FileNotFoundError:
            raise RequestNotFoundError("the file of this video has been removed") from None

    # Working.

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._keep_leases()
                await self._claim()
            except Exception:  # the disk is full, say: jobs wait until it works again
                logger.exception("video jobs: will try again")
                await asyncio.sleep(_PAUSE_S)
            await self._pause()

    async def _sweep(self) -> None:
        """Beside the work: file systems may be slow."""
        while True:
            try:
                await self._files.sweep(self._options.retention_s)
            except Exception:
                logger.exception("old video jobs cannot be removed: will try again")
            await asyncio.sleep(_SWEEP_S)

    async def _pause(self) -> None:
        """Until there may be something to do."""
        try:
            async with asyncio.timeout(min(_PAUSE_S, self._options.lease_s / _RENEWALS)):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _keep_leases(self) -> None:
        steps = {number: run.steps_done for number, run in self._runs.items()}
        if not steps:
            return
        # The time is that of the call, which may have waited for others in the thread.
        kept = await self._stored(lambda: self._store.renew(self._owner, steps, self._clock(), self._options.lease_s))
        for number in steps.keys() - kept:  # deleted through another process, or taken over
            if (run := self._runs.get(number)) is not None:
                run.stop()

    async def _claim(self) -> None:
        free = self._options.max_in_flight - len(self._runs)
        lease_s = self._options.lease_s
        for job in await self._stored(
            lambda: self._store.claim(self._owner, free, self._clock(), lease_s, MAX_JOBS_BYTES)
        ):
            if job.number in self._runs:  # its lease had run out while this process stood still: it goes on
                continue
            run = self._runs[job.number] = _Run(job)
            run.task = asyncio.get_running_loop().create_task(self._run(run))

    async def _run(self, run: _Run) -> None:
        job = run.job
        try:
            try:
                if job.attempts > self._options.max_attempts:
                    ends = job.attempts - 1
                    raise WorkerError(f"given up: the service has ended {ends} times while it made this video")
                await self._make(run)
            except TridentServeError as error:
                await self._failed(run, body_of(error)["error"])
        except Exception:  # a defect, or the disk: its lease runs out, and it is tried again a few times
            logger.exception("video job %s was interrupted", job.job_id)
        finally:
            if not self._is_stopping:
                self._runs.pop(job.number, None)
                self._wake.set()

    async def _make(self, run: _Run) -> None:
        """Raises what is wrong with the job; gives it back when the service cannot take it now."""
        try:
            update = await self._last_update(run)
        except (OverloadedError, WorkerError) as error:  # not the request's end: the way to the scheduler is lost
            await self._give_back(run, error)
            return
        if update is None:
            raise TridentServeError("the request ended without a result")
        if isinstance(update, CompletedUpdate):
            await self._completed(run, update)
        elif update.code == OverloadedError.code:
            await self._give_back(run, OverloadedError("the queue is full"))
        elif update.code in REFUSALS and await self._may_come_back(run.job.spec.model):
            await self._wait_for_model(run)
        else:
            await self._failed(run, openai_error(update.code, update.message, update.param))

    async def _may_come_back(self, model: str) -> bool:
        """Whether a model that refuses requests is expected to take them again."""
        try:
            health = await self._backend.health()
        except TridentServeError:  # the scheduler is not there: its models may be, when it is
            return True
        return self._away.may_come_back(model, health.get("models", {}).get(model))

    async def _last_update(self, run: _Run) -> CompletedUpdate | FailedUpdate | None:
        job = run.job
        picture = await self._stored(partial(self._store.picture, job.number)) if job.picture_sha256 else None
        if job.picture_sha256 and picture is None:  # it was deleted just now, and its picture with it
            return None
        spec = replace(job.spec, request_id=request_id_of(job))
        async with closing(self._backend.generate(spec, replace(job.inputs, image=picture))) as updates:
            async for update in updates:
                if isinstance(update, CompletedUpdate | FailedUpdate):
                    return update
                run.began = True
                if isinstance(update, ProgressUpdate):
                    run.steps_done = update.step
                    self._away.is_back(job.spec.model)
        return None

    async def _give_back(self, run: _Run, error: TridentServeError) -> None:
        logger.info("video job %s waits: %s", run.job.job_id, error)
        await self._release(run, _PAUSE_S, counted=run.began)

    async def _wait_for_model(self, run: _Run) -> None:
        logger.info("video job %s waits for its model, which is drained or replaced", run.job.job_id)
        await self._release(run, _AWAY_PAUSE_S, counted=False)

    async def _release(self, run: _Run, pause_s: float, counted: bool) -> None:
        again_s, number = self._clock() + pause_s, run.job.number
        await self._stored(lambda: self._store.release(self._owner, number, again_s, counted))

    async def _completed(self, run: _Run, update: CompletedUpdate) -> None:
        job, run.is_made = run.job, True
        told = {name: value for name, value in to_plain(update).items() if name in _TOLD}
        try:
            num_bytes = await self._files.write(job, update.outputs)
            ended_s = self._clock()
            kept = await self._stored(lambda: self._store.complete(self._owner, job.number, told, num_bytes, ended_s))
        except VideoStorageError as error:
            await self._failed(run, body_of(error)["error"])
            kept = False
        if not kept:
            await self._files.drop_unless_wanted(job)
        await self._files.make_room()

    async def _failed(self, run: _Run, error: dict[str, Any]) -> None:
        number, ended_s = run.job.number, self._clock()
        await self._stored(lambda: self._store.fail(self._owner, number, error, ended_s))

    async def _found(self, job_id: str) -> VideoJob:
        job = await self._asked(lambda: self._store.find(job_id))
        if job is None:
            raise RequestNotFoundError("there is no video with this id, or it has been removed")
        return job

    def _view(self, job: VideoJob) -> dict[str, Any]:
        run = self._runs.get(job.number)
        steps_done = job.steps_done if run is None else run.steps_done
        return video_view(job, steps_done, self._options.retention_s)

    async def _stored(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _asked(self, call: Callable[[], T]) -> T:
        """As `_stored`, for a client: raises `VideoStorageError` or `OverloadedError` for what SQLite raises."""
        with client_error():
            return await self._stored(call)


def request_id_of(job: VideoJob) -> str:
    """What the scheduler knows a job by: another id for each job, also where clients use that of the job again, and
    none that a client may choose."""
    return f"{job.job_id}~{job.number}"


def results_url(options: VideosArgs, data_dir: Path) -> str:
    """Where the files are."""
    return options.results_url or str(data_dir / "results")
