"""The live engine: effects of the scheduler become calls of workers, and what comes of these becomes events.

Everything runs in one event loop, except for the scheduler, which has its own thread (`core_thread`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from tridentserve.cells.summary import CellSummary
from tridentserve.engine.live.client_requests import ClientRequest, ClientRequests, find_request_id
from tridentserve.engine.live.core_thread import CoreThread
from tridentserve.engine.live.fleet import WorkerFleet
from tridentserve.engine.live.messages import PreviewNote, WorkerConfig
from tridentserve.engine.live.metrics import GAUGE_PERIOD_S, EngineMetrics
from tridentserve.engine.live.model_changes import ModelChanges
from tridentserve.engine.live.plan_calls import PeakEstimator
from tridentserve.engine.live.plan_driver import PlanDriver
from tridentserve.engine.live.prospects.teller import ProspectTeller
from tridentserve.engine.live.spawning.spawner import Spawner
from tridentserve.engine.live.updates import CompletedUpdate, FailedUpdate, QueuedUpdate, Update
from tridentserve.engine.live.warming.warm_up_runs import WarmUpOrder
from tridentserve.engine.live.warming.warmer import Warmer, WarmUpProgress
from tridentserve.engine.options import EngineOptions
from tridentserve.errors import InvalidRequestError, OverloadedError, TridentServeError
from tridentserve.plans import WorkerId
from tridentserve.protocols import StageMemory
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.explanation.recording import RecentDecisions, Recording
from tridentserve.scheduling.prediction.predictor import Quote
from tridentserve.scheduling.request_records import RequestRecord, RequestRecords, RequestState
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.scheduling.watching.cluster_state import ClusterState
from tridentserve.scheduling.watching.recent_history import RecentHistory

logger = logging.getLogger(__name__)


class LiveEngine:
    """Serves requests with the workers of a fleet. It must be made inside a running event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        workers: list[WorkerConfig],
        spawner: Spawner,
        abandon: Callable[[str, int, int], None],
        options: EngineOptions | None = None,
        memory: StageMemory | None = None,
        warm_up: Sequence[WarmUpOrder] = (),
    ) -> None:
        """`abandon(group, rank, plan_id)` tells the members of a process group that one of them is gone. `memory` says
        which memory plans are expected to take, so that workers refuse plans that cannot fit; no other thread may
        change it. `warm_up`: what workers run before they take requests."""
        self._options = options or EngineOptions()
        self._labels = {config.spec.worker_id: config.label for config in workers}
        self._loop = asyncio.get_running_loop()
        self._scheduler = scheduler  # belongs to the scheduler's thread
        self._warmer = Warmer(warm_up, PeakEstimator(memory))
        self._fleet = WorkerFleet(workers, spawner, self._on_joined, self._on_lost, self._warmer)
        self._recent = RecentDecisions(self._options.explain_last)
        self._core = CoreThread(
            scheduler, self._pass_on, self._log_crash, self._options.tick_s, self._options.decision_log, self._recent
        )
        self.models = ModelChanges(self._core, self._fleet, self._warmer, self._set_memory)
        self._clock_offset_s = time.time() - self._core.now_s()
        self._records = RequestRecords()
        self._history = RecentHistory()
        self._metrics = EngineMetrics()
        self._requests = ClientRequests(self._options.max_result_age_s)
        self._driver = PlanDriver(
            self._fleet,
            self._requests,
            self._core.post,
            self._on_step,
            self._on_preview,
            abandon,
            self._clock_offset_s,
            PeakEstimator(memory),
        )
        self._prospects = ProspectTeller(scheduler, self._core, self._requests, self._is_waiting)
        self._aside: dict[WorkerId, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    # Called by the service.

    @property
    def placement(self) -> dict[WorkerId, str]:
        """A short name of the replicas that each worker is meant to hold now."""
        return dict(self._labels)

    @property
    def healthy(self) -> bool:
        """The scheduler's thread is alive. Workers come and go."""
        return self._core.alive

    @property
    def warming(self) -> Mapping[WorkerId, WarmUpProgress]:
        """The workers that have come back and are being warmed up, with how far that is."""
        return self._warmer.progress

    @property
    def warming_models(self) -> Mapping[str, WarmUpProgress]:
        """The models that have been added and for which workers are being warmed up, with how far that is."""
        return self._warmer.model_progress

    @property
    def aside(self) -> Mapping[WorkerId, str]:
        """The workers that are given no plans for a while, with the reason (see `SetAside`)."""
        return dict(self._aside)

    def list_live_workers(self) -> list[WorkerId]:
        return self._fleet.joined

    async def start(self, tell_warming: Callable[[WarmUpProgress], object] = lambda progress: None) -> None:
        """Start the scheduler and all workers; returns when all can take plans. `tell_warming` is called with how far
        their warm-up is."""
        self._core.start()
        await self._fleet.start(tell_warming)
        self._tasks = [self._loop.create_task(work) for work in (self._report_metrics(), self._prospects.run())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            self._report_now()
        await self._fleet.stop()
        self._core.stop()

    async def generate(self, spec: RequestSpec, inputs: GenerationInputs) -> AsyncGenerator[Update, None]:
        """The updates of `generate_in_batches`, one by one."""
        async with aclosing(self.generate_in_batches(spec, inputs)) as batches:
            async for batch in batches:
                for update in batch:
                    yield update

    async def generate_in_batches(
        self, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool = True
    ) -> AsyncGenerator[list[Update], None]:
        """Accept a request, or join the one with the same id. Yields its updates (see `updates`): each time all that
        have come, as its client may be slow and its steps short. Without `with_progress` there are none of progress.

        Closing this iterator early means that the client has left: when the last client has, the request stops."""
        request = self._requests.find_joinable(spec.request_id)
        if request is not None and not request.is_same(spec, inputs):
            message = "request_id has been used for another request: choose a new one"
            yield [FailedUpdate(spec.request_id, InvalidRequestError.code, message, "request_id")]
            return
        if request is None and self._requests.num_unfinished >= self._options.max_requests:
            self._metrics.count_refused(spec.model)
            yield [FailedUpdate(spec.request_id, OverloadedError.code, "the queue is full, try again later")]
            return
        if request is None:
            request = self._requests.admit(spec, inputs)
            request.publish(QueuedUpdate(spec.request_id))
            self._core.post(ev.RequestArrived(replace(spec, request_id=request.key)))
        if with_progress and not request.watchers:
            self._driver.watch_request(request)
        inbox = request.join(with_progress, inputs.wants_previews)
        if with_progress:
            self._prospects.wake()
        try:
            while True:
                updates = [await inbox.get()]
                while not inbox.empty():
                    updates.append(inbox.get_nowait())
                yield updates
                if isinstance(updates[-1], CompletedUpdate | FailedUpdate):
                    return
        finally:
            if self._requests.leave(request, inbox):
                self.cancel(spec.request_id)

    def has_request(self, request_id: str) -> bool:
        """True when `generate` joins a request with this id: one that is unfinished, or has ended a short time ago."""
        return self._requests.find_joinable(request_id) is not None

    async def summarize_load(self) -> CellSummary:
        """The load with all requests that have arrived so far, as `CellRouter` compares it."""
        scheduler, core = self._scheduler, self._core
        return await asyncio.wrap_future(core.call(lambda: scheduler.summarize_load(core.now_s())))

    async def quote(self, specs: Sequence[RequestSpec]) -> list[Quote | ev.Reject | None]:
        """The prediction for each of these requests, if it alone came now; its refusal; None where nothing can be
        predicted. Ticks go on between two of them."""
        scheduler, core = self._scheduler, self._core
        return [
            await asyncio.wrap_future(core.call(partial(lambda spec: scheduler.quote(spec, core.now_s()), spec)))
            for spec in specs
        ]

    async def record_decisions(self) -> Recording:
        """The decisions about the latest requests, for explanations."""
        return await asyncio.wrap_future(self._core.call(self._recent.copy))

    async def describe_cluster(self) -> ClusterState:
        """The state of the cluster in seconds of the Unix clock, with what has ended in the last minute."""
        scheduler, core = self._scheduler, self._core
        present = await asyncio.wrap_future(core.call(lambda: scheduler.describe_cluster(core.now_s())))
        state = self._history.complete(present, self._driver.handoff_levels)
        return state.shift(self._clock_offset_s).rename_requests(find_request_id)

    def cancel(self, request_id: str) -> bool:
        """Stop a request for all its clients. False when it is unknown or has ended."""
        request = self._requests.withdraw(request_id)
        if request is None:
            return False
        self._core.post(ev.RequestCancelled(request.key))
        return True

    # Called by the scheduler's thread.

    def _pass_on(self, now_s: float, event: ev.Event, effects: list[ev.Effect]) -> None:
        self._loop.call_soon_threadsafe(self._apply, now_s, event, effects)

    def _log_crash(self, error: BaseException) -> None:
        logger.critical("the scheduler's thread has ended: %r", error)

    # The effects of the scheduler, in the event loop.

    def _apply(self, now_s: float, event: ev.Event, effects: list[ev.Effect]) -> None:
        self._records.apply(event, effects, now_s)
        self._history.apply(event, effects, now_s)
        for effect in effects:
            logger.debug("%s", effect)
            match effect:
                case ev.RunPlan():
                    self._driver.start_plan(effect.plan)
                case ev.Abort():
                    self._driver.stop_plan(effect.plan_id)
                case ev.Yield():
                    self._driver.pause_plan(effect.plan_id)
                case ev.Requeue():
                    self._requeue(effect)
                case ev.Degrade():
                    if (request := self._requests.find_unfinished(effect.request_id)) is not None:
                        request.degrade(effect)
                case ev.Finish() | ev.Reject():
                    self._end_request(effect.request_id)
                case ev.Place():
                    self._set_placement(effect)
                case ev.SetAside():
                    self._note_aside(effect, now_s)
        self.models.note_event(event, effects)

    def _requeue(self, effect: ev.Requeue) -> None:
        request = self._requests.find_unfinished(effect.request_id)
        if request is not None:
            how = f"resumes from step {effect.steps_done}" if effect.steps_done else "starts again"
            logger.warning("request %s %s: %s", request.spec.request_id, how, effect.reason)
            self._metrics.count_retry(request.spec.model, effect.steps_done)
            self._driver.forget_request(request, request.last_plan_id, with_checkpoints=effect.steps_done == 0)

    def _end_request(self, key: str) -> None:
        record = self._records.records.get(key)
        self._records.drop(key)
        # Only a result is worth keeping: a client that got an error may ask again.
        request = self._requests.end(key, keep=record is not None and record.state is RequestState.COMPLETED)
        if record is not None and request is not None:
            self._metrics.count_ended(record)
            self._driver.forget_request(request, request.last_plan_id)
            request.publish(self._make_last_update(request, record))

    def _make_last_update(self, request: ClientRequest, record: RequestRecord) -> Update:
        if record.state is RequestState.COMPLETED:
            return request.make_result(record, self._clock_offset_s)
        code, message = record.error_code or TridentServeError.code, record.error or "no reason given"
        return FailedUpdate(request.spec.request_id, code, message, predicted_s=record.predicted_s)

    def _note_aside(self, effect: ev.SetAside, now_s: float) -> None:
        self._aside.pop(effect.worker_id, None)
        if effect.until_s is None:
            logger.warning("worker %s is given plans again: %s", effect.worker_id, effect.reason)
            return
        self._aside[effect.worker_id] = effect.reason
        self._metrics.count_aside(effect.worker_id)
        left_s = effect.until_s - now_s
        logger.warning("worker %s is set aside for %.0f s: %s", effect.worker_id, left_s, effect.reason)

    def _set_placement(self, effect: ev.Place) -> None:
        logger.info("new placement: %s", effect.reason)
        self._labels = {worker_id: effect.plan.describe(worker_id) for worker_id in self._labels}
        self._fleet.set_placement(effect.plan)

    # Called by the plans and by the fleet.

    def _set_memory(self, memory: StageMemory) -> None:
        self._driver.peaks = PeakEstimator(memory)
        self._warmer.peaks = PeakEstimator(memory)

    def _on_step(self, request: ClientRequest, steps_done: int) -> None:
        if self._requests.find_unfinished(request.key) is not None:
            request.publish(self._prospects.make_progress(request, steps_done))

    def _on_preview(self, request: ClientRequest, note: PreviewNote) -> None:
        if self._requests.find_unfinished(request.key) is not None:
            request.publish_preview(note.step, note.files)

    def _is_waiting(self, request: ClientRequest) -> bool:
        record = self._records.records.get(request.key)
        return record is not None and record.state is RequestState.QUEUED

    def _on_joined(self, config: WorkerConfig) -> None:
        self._core.post(ev.WorkerJoined(config.spec, config.incarnation))

    def _on_lost(self, worker_id: WorkerId, error: str) -> None:
        self._core.post(ev.WorkerLost(worker_id, error))
        self._driver.abandon_worker(worker_id)

    async def _report_metrics(self) -> None:
        while True:
            self._report_now()
            await asyncio.sleep(GAUGE_PERIOD_S)

    def _report_now(self) -> None:
        states = [record.state for record in self._records.records.values()]
        self._metrics.report(
            states.count(RequestState.QUEUED),
            states.count(RequestState.RUNNING),
            len(self._fleet.joined),
            len(self._aside),
        )
