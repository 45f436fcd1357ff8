"""Works off video jobs: leases them from the store, runs them, and renews their leases.

Several processes may do so over one store.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable

from deployments.backend import Backend
from deployments.config.videos import VideosArgs
from deployments.schemas.image_limits import MAX_JOBS_BYTES
from deployments.videos.job_runner import PAUSE_S, JobRun, JobRunner
from deployments.videos.retention import VideoRetention
from deployments.videos.store_thread import StoreThread
from deployments.videos.video_job import VideoJob

logger = logging.getLogger(__name__)

_RENEWALS = 3.0
"""Renewals of a lease before it runs out."""


class VideoWorker:
    """The jobs that this process has leased. It lives in one event loop."""

    def __init__(
        self,
        backend: Backend,
        options: VideosArgs,
        store: StoreThread,
        retention: VideoRetention,
        clock: Callable[[], float],
    ) -> None:
        """`clock` gives seconds of the Unix clock."""
        self._options = options
        self._clock = clock
        self._owner = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._store = store
        self._runner = JobRunner(self._owner, backend, store, retention, options.max_attempts, clock)
        self._runs: dict[int, JobRun] = {}
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._is_stopping = False

    def start(self) -> None:
        """Begin to work, also on the jobs of earlier processes as soon as their leases have run out."""
        self._pump = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """Give all jobs back, so that the next process resumes them at once."""
        self._is_stopping = True
        for run in self._runs.values():
            run.stop()
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if self._pump is not None:
            self._pump.cancel()
            tasks.append(self._pump)
        await asyncio.gather(*tasks, return_exceptions=True)
        for number in self._runs:
            await self._runner.release(number, 0.0, counted=False)

    @property
    def is_healthy(self) -> bool:
        """False when jobs are not worked off any more."""
        return self._pump is None or not self._pump.done()

    def wake(self) -> None:
        """Look for jobs at once."""
        self._wake.set()

    def stop_run(self, number: int) -> None:
        """Stop a job, if this process runs it."""
        if (run := self._runs.get(number)) is not None:
            run.stop()

    def count_steps(self, job: VideoJob) -> int:
        """Denoising steps of a job that are done."""
        run = self._runs.get(job.number)
        return job.steps_done if run is None else run.steps_done

    def find_prospects(self, job: VideoJob) -> tuple[int | None, float | None]:
        """The number of jobs and other requests that go before a job in the scheduler, and the seconds until it is
        predicted to end; None where that is not known."""
        run = self._runs.get(job.number)
        return (None, None) if run is None or run.update is None else (run.update.queue_position, run.update.eta_s)

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._keep_leases()
                await self._claim()
            except Exception:  # the disk is full, for example: jobs wait until it works again
                logger.exception("video jobs: will try again")
                await asyncio.sleep(PAUSE_S)
            await self._pause()

    async def _pause(self) -> None:
        """Wait until there may be something to do."""
        try:
            async with asyncio.timeout(min(PAUSE_S, self._options.lease_s / _RENEWALS)):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _keep_leases(self) -> None:
        steps = {number: run.steps_done for number, run in self._runs.items()}
        if not steps:
            return
        lease_s = self._options.lease_s
        # The clock is read in the store's thread, because the call may have waited there for others.
        kept = await self._store.run(lambda store: store.renew(self._owner, steps, self._clock(), lease_s))
        for number in steps.keys() - kept:  # deleted through another process, or taken over
            self.stop_run(number)

    async def _claim(self) -> None:
        free, lease_s = self._options.max_in_flight - len(self._runs), self._options.lease_s
        jobs = await self._store.run(
            lambda store: store.claim(self._owner, free, self._clock(), lease_s, MAX_JOBS_BYTES)
        )
        for job in jobs:
            if job.number in self._runs:  # its lease had run out while this process stood still, and its run continues
                continue
            run = self._runs[job.number] = JobRun(job)
            run.task = asyncio.get_running_loop().create_task(self._run(run))

    async def _run(self, run: JobRun) -> None:
        try:
            await self._runner.run(run)
        except Exception:
            logger.exception("video job %s was interrupted", run.job.job_id)
        finally:
            if not self._is_stopping:
                self._runs.pop(run.job.number, None)
                self._wake.set()
