"""Runs one leased video job: has the service make the videos, stores them, and ends the job or gives it back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from deployments.backend import Backend, closing
from deployments.openai_errors import describe_error, describe_failure
from deployments.plain_updates import to_plain
from deployments.videos.model_absence import REFUSALS, ModelAbsences
from deployments.videos.retention import VideoRetention
from deployments.videos.store_thread import StoreThread
from deployments.videos.video_job import VideoJob
from tridentserve.engine.live.updates import CompletedUpdate, FailedUpdate, ProgressUpdate, QueuedUpdate
from tridentserve.errors import OverloadedError, TridentServeError, VideoStorageError, WorkerError

logger = logging.getLogger(__name__)

_RESULT_FIELDS = (
    *("seed", "queue_s", "latency_s", "slo_s", "slo_met", "predicted_s", "reduced_steps", "retries"),
    *("quality", "skipped_steps", "stage_durations", "timeline", "peak_memory_mb"),
)
"""Fields of a result that the store keeps, in addition to those of the request."""
PAUSE_S = 1.0
"""Seconds that a job waits after the service could not accept it."""
_AWAY_PAUSE_S = 5.0
"""Seconds that a job waits whose model is away."""


@dataclass(slots=True)
class JobRun:
    """One job that this process runs."""

    job: VideoJob
    task: asyncio.Task[None] | None = None
    steps_done: int = 0
    """Denoising steps that are done."""
    update: QueuedUpdate | ProgressUpdate | None = None
    """The latest update of the scheduler's, with the prospects of the job."""
    began: bool = False
    """The scheduler has accepted the request."""
    is_made: bool = False
    """The service has answered with a result."""

    def stop(self) -> None:
        """Stop the run because no client wants the job any more. A result is written to its end by a thread that
        nothing stops, and is removed afterwards if it cannot be kept."""
        if self.task is not None and not self.is_made:
            self.task.cancel()


class JobRunner:
    """Runs the jobs that `owner` has leased."""

    def __init__(
        self,
        owner: str,
        backend: Backend,
        store: StoreThread,
        retention: VideoRetention,
        max_attempts: int,
        clock: Callable[[], float],
    ) -> None:
        """A job during which the service ended `max_attempts` times is given up. `clock` gives seconds of the Unix
        clock."""
        self._owner = owner
        self._backend = backend
        self._store = store
        self._retention = retention
        self._max_attempts = max_attempts
        self._clock = clock
        self._absences = ModelAbsences(clock)

    async def run(self, run: JobRun) -> None:
        """Run a job to its end, or give it back. Raises when the store cannot be reached, or on a defect: then the
        lease of the job runs out, and it is tried again a few times."""
        try:
            if run.job.attempts > self._max_attempts:
                ends = run.job.attempts - 1
                raise WorkerError(f"given up: the service has ended {ends} times while it made this video")
            await self._make(run)
        except TridentServeError as error:
            await self._fail(run, describe_error(error))

    async def release(self, number: int, pause_s: float, counted: bool) -> None:
        """Give a job back, for any process to lease after `pause_s` seconds. Unless `counted`, it was no attempt."""
        again_s = self._clock() + pause_s if pause_s else 0.0
        await self._store.run(lambda store: store.release(self._owner, number, again_s, counted))

    async def _make(self, run: JobRun) -> None:
        """Raises the error of the job; gives it back when the service cannot accept it now."""
        try:
            update = await self._wait_for_end(run)
        except (OverloadedError, WorkerError) as error:  # the way to the scheduler is lost, which does not end a job
            await self._give_back(run, error)
            return
        if update is None:
            raise TridentServeError("the request ended without a result")
        if isinstance(update, CompletedUpdate):
            await self._complete(run, update)
        elif update.code == OverloadedError.code:
            await self._give_back(run, OverloadedError("the queue is full"))
        elif update.code in REFUSALS and await self._may_return(run.job.spec.model):
            logger.info("video job %s waits for its model, which is drained or replaced", run.job.job_id)
            await self.release(run.job.number, _AWAY_PAUSE_S, counted=False)
        else:
            await self._fail(run, describe_failure(update.code, update.message, update.param))

    async def _may_return(self, model: str) -> bool:
        """True if a model that refuses requests is expected to accept them again."""
        try:
            health = await self._backend.get_health()
        except TridentServeError:  # the scheduler is absent: its models may be there when it is
            return True
        return self._absences.may_return(model, health.get("models", {}).get(model))

    async def _wait_for_end(self, run: JobRun) -> CompletedUpdate | FailedUpdate | None:
        job, image = run.job, None
        if job.image_sha256 is not None:
            image = await self._store.run(lambda store: store.find_image(job.number))
            if image is None:  # the job was deleted a moment ago, and its image with it
                return None
        spec = replace(job.spec, request_id=make_request_id(job))
        # Nobody sees previews of a job.
        inputs = replace(job.inputs, image=image, partial_images=0, preview_interval_s=None)
        async with closing(self._backend.generate(spec, inputs)) as updates:
            async for update in updates:
                if isinstance(update, CompletedUpdate | FailedUpdate):
                    return update
                run.began = True
                if isinstance(update, QueuedUpdate | ProgressUpdate):
                    run.update = update
                if isinstance(update, ProgressUpdate):
                    run.steps_done = update.step
                    self._absences.mark_present(job.spec.model)
        return None

    async def _give_back(self, run: JobRun, error: TridentServeError) -> None:
        logger.info("video job %s waits: %s", run.job.job_id, error)
        await self.release(run.job.number, PAUSE_S, counted=run.began)

    async def _complete(self, run: JobRun, update: CompletedUpdate) -> None:
        job, run.is_made = run.job, True
        result = {name: value for name, value in to_plain(update).items() if name in _RESULT_FIELDS}
        try:
            num_bytes = await self._retention.write(job, update.outputs)
            ended_s = self._clock()
            kept = await self._store.run(
                lambda store: store.complete(self._owner, job.number, result, num_bytes, ended_s)
            )
        except VideoStorageError as error:
            await self._fail(run, describe_error(error))
            kept = False
        if not kept:
            await self._retention.drop_unless_wanted(job)
        await self._retention.make_room()

    async def _fail(self, run: JobRun, error: dict[str, Any]) -> None:
        number, ended_s = run.job.number, self._clock()
        await self._store.run(lambda store: store.fail(self._owner, number, error, ended_s))


def make_request_id(job: VideoJob) -> str:
    """The id by which the scheduler knows a job. Each job has another id, also where clients use the job's id again,
    and no client may choose such an id."""
    return f"{job.job_id}~{job.number}"
