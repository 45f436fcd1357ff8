"""The live engine: effects of the scheduler become actor calls, completions become events.

Everything here runs on one event loop, but for the scheduler, which has its own thread (`core_thread`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from tridentserve.engine.live.client_requests import Job, JobBook
from tridentserve.engine.live.core_thread import CoreThread
from tridentserve.engine.live.fleet import Fleet, PlanCall, WorkerResources
from tridentserve.engine.live.messages import PlanReport, ReplicaLoad, StatesSaved, StepNote, WorkerConfig
from tridentserve.engine.live.metrics import GAUGE_PERIOD_S, EngineMetrics
from tridentserve.engine.live.model_changes import ModelChanges
from tridentserve.engine.live.plan_calls import (
    contents,
    expected_peaks,
    outcome,
    take_images,
    untold_steps,
)
from tridentserve.engine.live.updates import CompletedUpdate, FailedUpdate, ProgressUpdate, QueuedUpdate, Update
from tridentserve.engine.options import EngineOptions
from tridentserve.errors import InvalidRequestError, OverloadedError, TridentServeError, WorkerError
from tridentserve.plans import DispatchPlan, WorkerId
from tridentserve.protocols import StageTimes
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.request_records import RequestRecord, RequestRecords, RequestState
from tridentserve.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

# The requests of a plan that had not ended when it was sent, by key.
Jobs = dict[str, Job]


class LiveEngine:
    """Serves requests with the workers of a fleet. Make it inside a running event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        workers: list[WorkerConfig],
        resources: WorkerResources,
        abandon: Callable[[str, int, int], None],
        options: EngineOptions | None = None,
        times: StageTimes | None = None,
    ) -> None:
        """`abandon(group, rank, plan_id)` tells the members of a process group that one of them is gone. `times`: what
        plans are expected to take of memory, so that workers refuse those that cannot fit."""
        self._abandon = abandon
        self._options = options or EngineOptions()
        self._times = times
        self._labels = {config.spec.worker_id: config.label for config in workers}
        self._loop = asyncio.get_running_loop()
        self._fleet = Fleet(workers, resources, self._on_joined, self._on_lost)
        self._core = CoreThread(
            scheduler, self._from_core, self._core_crashed, self._options.tick_s, self._options.decision_log
        )
        self.models = ModelChanges(self._core.post, self._fleet)
        self._clock_offset_s = time.time() - self._core.now_s()
        self._records = RequestRecords()
        self._metrics = EngineMetrics()
        self._jobs = JobBook(self._options.max_result_age_s)
        self._reporter: asyncio.Task[None] | None = None
        self._plans: dict[int, DispatchPlan] = {}  # given to workers, not reported yet
        self._tasks: set[asyncio.Task[None]] = set()

    # What the service calls.

    @property
    def placement(self) -> dict[WorkerId, str]:
        """What each worker is meant to hold now, in a few words."""
        return dict(self._labels)

    async def start(self) -> None:
        """Start the scheduler and all workers; returns when all can take plans."""
        self._core.start()
        await self._fleet.start()
        self._reporter = self._loop.create_task(self._report_levels())

    async def _report_levels(self) -> None:
        while True:
            states = [record.state for record in self._records.records.values()]
            self._metrics.levels(
                states.count(RequestState.QUEUED), states.count(RequestState.RUNNING), len(self._fleet.alive)
            )
            await asyncio.sleep(GAUGE_PERIOD_S)

    async def stop(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
        await self._fleet.stop()
        self._core.stop()

    @property
    def healthy(self) -> bool:
        """The scheduler's thread is alive. Workers come and go."""
        return self._core.alive

    def workers_alive(self) -> list[WorkerId]:
        return self._fleet.alive

    async def generate(self, spec: RequestSpec, inputs: GenerationInputs) -> AsyncGenerator[Update, None]:
        """Accept a request, or join the one with the same id. Yields its updates (see `updates`).

        Closing this iterator early means that the client has left: when the last one has, the request stops."""
        job = self._jobs.joinable(spec.request_id)
        if job is not None and not job.is_same(spec, inputs):
            message = "request_id has been used for another request: choose a new one"
            yield FailedUpdate(spec.request_id, InvalidRequestError.code, message, "request_id")
            return
        if job is None and self._jobs.num_unfinished >= self._options.max_requests:
            self._metrics.refused(spec.model)
            yield FailedUpdate(spec.request_id, OverloadedError.code, "the queue is full, try again later")
            return
        if job is None:
            job = self._jobs.admit(spec, inputs)
            job.tell(QueuedUpdate(spec.request_id))
            self._core.post(ev.RequestArrived(replace(spec, request_id=job.key)))
        inbox = job.join()
        try:
            while True:
                update = await inbox.get()
                yield update
                if isinstance(update, CompletedUpdate | FailedUpdate):
                    return
        finally:
            if self._jobs.leave(job, inbox):
                self.cancel(spec.request_id)

    def cancel(self, request_id: str) -> bool:
        """Stop a request for all its clients. False when it is unknown or has ended."""
        job = self._jobs.withdraw(request_id)
        if job is None:
            return False
        self._core.post(ev.RequestCancelled(job.key))
        return True

    # From the scheduler.

    def _from_core(self, now_s: float, event: ev.Event, effects: list[ev.Effect]) -> None:
        """Called in the scheduler's thread."""
        self._loop.call_soon_threadsafe(self._apply, now_s, event, effects)

    def _core_crashed(self, error: BaseException) -> None:
        logger.critical("the scheduler's thread has ended: %r", error)

    def _apply(self, now_s: float, event: ev.Event, effects: list[ev.Effect]) -> None:
        self._records.apply(event, effects, now_s)
        for effect in effects:
            logger.debug("%s", effect)
            match effect:
                case ev.RunPlan():
                    self._spawn(effect.plan)
                case ev.Abort():
                    self._tell_leader(effect.plan_id, "stop")
                case ev.Yield():
                    self._tell_leader(effect.plan_id, "pause")
                case ev.Requeue():
                    self._requeued(effect)
                case ev.Finish() | ev.Reject():
                    self._ended(effect.request_id)
                case ev.Place():
                    logger.info("new placement: %s", effect.reason)
                    self._labels = {worker_id: effect.plan.describe(worker_id) for worker_id in self._labels}
                    self._fleet.place(effect.plan)
        self.models.heard(event, effects)

    def _tell_leader(self, plan_id: int, order: str) -> None:
        """Stop or pause a plan: its leader has all members do so at one step boundary."""
        plan = self._plans.get(plan_id)
        if plan is not None:
            self._call({plan.leader}, order, plan.plan_id)

    def _requeued(self, effect: ev.Requeue) -> None:
        job = self._jobs.unfinished(effect.request_id)
        if job is not None:
            where = f"goes on from step {effect.steps_done}" if effect.steps_done else "starts again"
            logger.warning("request %s %s: %s", job.spec.request_id, where, effect.reason)
            self._metrics.retried(job.spec.model, effect.steps_done)
            self._forget(job, copies=effect.steps_done == 0)

    def _ended(self, key: str) -> None:
        record = self._records.records.get(key)
        self._records.drop(key)
        # Only a result is worth keeping: who got an error may ask again.
        job = self._jobs.end(key, keep=record is not None and record.state is RequestState.COMPLETED)
        if record is not None and job is not None:
            self._metrics.request_ended(record)
            self._forget(job)
            job.tell(self._final_update(job, record))

    def _final_update(self, job: Job, record: RequestRecord) -> Update:
        if record.state is RequestState.COMPLETED:
            return job.completed(record, self._clock_offset_s)
        code, message = record.error_code or TridentServeError.code, record.error or "no reason given"
        return FailedUpdate(job.spec.request_id, code, message)

    # To and from the workers.

    def _spawn(self, plan: DispatchPlan) -> None:
        jobs = {name: job for name in plan.request_ids if (job := self._jobs.unfinished(name)) is not None}
        self._plans[plan.plan_id] = plan
        destinations = {member.request_id: member.push_to for member in plan.members}
        for name, job in jobs.items():
            job.workers.update(plan.workers)
            if (push_to := destinations[name]) is not None:
                job.workers.add(push_to)
            if plan.saves is not None:
                job.workers.add(plan.saves.keeper)
            job.last_plan_id = plan.plan_id
        # Calls are made here, in the order of the effects, before anything is awaited: they give out the turns.
        peaks = expected_peaks(self._times, plan, [job.spec for job in jobs.values()])
        calls = [
            self._fleet.run(worker_id, plan, contents(plan, jobs, worker_id), peak)
            for worker_id, peak in zip(plan.workers, peaks, strict=True)
        ]
        task = self._loop.create_task(self._run_plan(jobs, plan, calls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_plan(self, jobs: Jobs, plan: DispatchPlan, calls: list[PlanCall | None]) -> None:
        members = zip(plan.workers, calls, strict=True)
        reports = await asyncio.gather(*(self._run_member(jobs, plan, worker_id, call) for worker_id, call in members))
        del self._plans[plan.plan_id]
        ended = outcome(plan, reports, self._clock_offset_s)
        self._core.post(ended)
        if isinstance(ended, ev.StageFinished):
            for member in plan.members:
                # What it was made of is of no use any more; a request of many segments would fill its workers.
                if member.input_id is not None and (job := jobs.get(member.request_id)) is not None:
                    self._call(job.workers, "forget", job.key, member.input_id, False)

    async def _run_member(
        self, jobs: Jobs, plan: DispatchPlan, worker_id: WorkerId, call: PlanCall | None
    ) -> PlanReport:
        """One worker's part of a plan; returns its report, a failure when the worker is lost. Never raises: the
        scheduler would wait for the plan for ever."""
        if call is None:
            self._speak_for(worker_id, plan)
            return PlanReport(plan.plan_id, "failed", error=f"{worker_id} is down, or could not be called")
        try:
            return await self._listen(jobs, plan, worker_id, call)
        except RayError as error:
            return PlanReport(plan.plan_id, "failed", error=f"{worker_id}: {str(error).splitlines()[0]}")
        except Exception as error:
            logger.exception("plan %d of %s failed in the engine", plan.plan_id, ", ".join(plan.request_ids))
            return PlanReport(plan.plan_id, "failed", error=f"{worker_id}: {type(error).__name__}")

    async def _listen(self, jobs: Jobs, plan: DispatchPlan, worker_id: WorkerId, call: PlanCall) -> PlanReport:
        """The report of one worker, with the notes before it and the pictures behind it taken in."""
        async for reference in call:
            item = await reference
            if isinstance(item, StepNote):
                if (job := jobs.get(item.request_id)) is not None:
                    self._progressed(job, item)
                continue
            if isinstance(item, StatesSaved):
                if plan.saves is not None:
                    spans = tuple(span.shifted(-self._clock_offset_s) for span in item.spans)
                    self._core.post(ev.CheckpointSaved(plan.plan_id, item.num_steps, plan.saves.keeper, spans))
                continue
            if isinstance(item, ReplicaLoad):
                self._core.post(
                    ev.ReplicaLoaded(worker_id, item.loaded, item.evicted, item.source, item.num_bytes, item.seconds)
                )
                continue
            for request_id, num_images in item.num_images.items():
                await take_images(jobs.get(request_id), call, num_images)
            for job in jobs.values():
                job.peak_memory_bytes = max(job.peak_memory_bytes, item.peak_memory_bytes)
                job.tiled |= item.tiled
            for note in untold_steps(plan, item) if worker_id == plan.leader else ():
                if (job := jobs.get(note.request_id)) is not None:
                    self._progressed(job, note)
            return item
        raise WorkerError("ended without a report")

    def _progressed(self, job: Job, note: StepNote) -> None:
        self._records.progress(job.key, note.steps_done)
        if self._jobs.unfinished(job.key) is not None:
            job.tell(ProgressUpdate(job.spec.request_id, note.steps_done, job.spec.num_inference_steps))

    def _forget(self, job: Job, copies: bool = True) -> None:
        self._call(job.workers, "forget", job.key, job.last_plan_id, copies)

    def _call(self, workers: set[WorkerId], method: str, *args: Any) -> None:
        """Tell workers something; one that is lost needs no telling."""
        for worker_id in workers.intersection(self._fleet.alive):
            getattr(self._fleet.handle(worker_id), method).remote(*args)

    def _on_joined(self, config: WorkerConfig) -> None:
        self._core.post(ev.WorkerJoined(config.spec, config.incarnation))

    def _on_lost(self, worker_id: WorkerId, error: str) -> None:
        self._core.post(ev.WorkerLost(worker_id, error))
        for plan in self._plans.values():
            if worker_id in plan.workers:
                self._speak_for(worker_id, plan)

    def _speak_for(self, worker_id: WorkerId, plan: DispatchPlan) -> None:
        """A lost worker cannot tell the others of its instance that it will not come."""
        rank = plan.workers.index(worker_id)
        try:
            for size, group in plan.groups.items():
                if rank < size:
                    self._abandon(group, rank, plan.plan_id)
        except RuntimeError as error:  # of the store: the others wait for their timeout then
            logger.warning("cannot speak for %s in plan %d: %s", worker_id, plan.plan_id, error)
