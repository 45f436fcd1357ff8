"""Gives the scheduler's plans to the workers, and reports their results to the scheduler and the clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tridentserve.engine.live.client_requests import ClientRequest, ClientRequests
from tridentserve.engine.live.fleet import WorkerFleet
from tridentserve.engine.live.messages import CheckpointNote, PlanNote, PlanReport, ProgressNote, ReplicaLoad
from tridentserve.engine.live.plan_calls import (
    build_plan_event,
    collect_references,
    estimate_peaks,
    list_last_steps,
    select_inputs,
)
from tridentserve.engine.live.worker_handle import PlanCall
from tridentserve.errors import WorkerError
from tridentserve.plans import DispatchPlan, WorkerId
from tridentserve.protocols import StageMemory
from tridentserve.scheduling import events as ev

logger = logging.getLogger(__name__)

# The requests of a plan that had not ended when it was sent, by key.
PlanRequests = Mapping[str, ClientRequest]


class PlanDriver:
    """Lives in the engine's event loop."""

    def __init__(
        self,
        fleet: WorkerFleet,
        requests: ClientRequests,
        post: Callable[[ev.Event], None],
        on_step: Callable[[ClientRequest, int], None],
        abandon: Callable[[str, int, int], None],
        clock_offset_s: float,
        memory: StageMemory | None,
    ) -> None:
        """`post` gives the scheduler an event; `on_step(request, steps_done)` is called for each denoising step of a
        request with watchers, some time after it, and for the last step of each plan; `abandon(group, rank, plan_id)`
        tells the members of a process group that one of them is gone. The scheduler's time plus `clock_offset_s` is
        the Unix clock's."""
        self._fleet = fleet
        self._requests = requests
        self._post = post
        self._on_step = on_step
        self._abandon = abandon
        self._clock_offset_s = clock_offset_s
        self.memory = memory
        """Memory that plans are expected to take, which no other thread changes; None when it is not known."""
        self._plans: dict[int, DispatchPlan] = {}  # given to workers, not reported yet
        self._tasks: set[asyncio.Task[None]] = set()

    def start_plan(self, plan: DispatchPlan) -> None:
        """Give a plan to its workers."""
        found = ((name, self._requests.find_unfinished(name)) for name in plan.request_ids)
        requests = {name: request for name, request in found if request is not None}
        self._plans[plan.plan_id] = plan
        for member in plan.members:
            if (request := requests.get(member.request_id)) is not None:
                request.add_plan(plan, member)
        is_watched = any(request.watchers for request in requests.values())
        # Calls are made here, in the order of the effects, before anything is awaited: they give out the turns.
        peaks = estimate_peaks(self.memory, plan, [request.spec for request in requests.values()])
        calls = [
            self._fleet.run_plan(worker_id, plan, select_inputs(plan, requests, worker_id), peak, is_watched)
            for worker_id, peak in zip(plan.workers, peaks, strict=True)
        ]
        task = asyncio.get_running_loop().create_task(self._finish_plan(requests, plan, calls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop_plan(self, plan_id: int) -> None:
        """Stop a plan: its leader has all its workers stop at one step boundary."""
        if (plan := self._plans.get(plan_id)) is not None:
            for leader in self._fleet.list_handles([plan.leader]):
                leader.stop_plan(plan_id)

    def pause_plan(self, plan_id: int) -> None:
        """Pause a plan: its leader has all its workers pause at one step boundary."""
        if (plan := self._plans.get(plan_id)) is not None:
            for leader in self._fleet.list_handles([plan.leader]):
                leader.pause_plan(plan_id)

    def watch_request(self, request: ClientRequest) -> None:
        """A client wants to hear of the steps of a request, and none did before."""
        if (plan := self._plans.get(request.last_plan_id)) is not None:
            for leader in self._fleet.list_handles([plan.leader]):
                leader.watch_plan(plan.plan_id)

    def forget_request(self, request: ClientRequest, last_plan_id: int, with_checkpoints: bool = True) -> None:
        """Have the workers drop what they keep of a request's plans up to `last_plan_id`; a worker that is lost keeps
        nothing."""
        for worker in self._fleet.list_handles(request.workers):
            worker.forget_request(request.key, last_plan_id, with_checkpoints)

    def abandon_worker(self, worker_id: WorkerId) -> None:
        """A worker is lost: the other workers of its plans must not wait for it."""
        for plan in self._plans.values():
            if worker_id in plan.workers:
                self._abandon_groups(worker_id, plan)

    async def _finish_plan(self, requests: PlanRequests, plan: DispatchPlan, calls: list[PlanCall | None]) -> None:
        """Wait for all workers of a plan, and tell the scheduler how it ended."""
        workers = zip(plan.workers, calls, strict=True)
        reports = await asyncio.gather(*(self._wait_for_worker(requests, plan, *worker) for worker in workers))
        del self._plans[plan.plan_id]
        event = build_plan_event(plan, reports, self._clock_offset_s)
        self._post(event)
        if isinstance(event, ev.StageFinished):
            for member in plan.members:
                # The plan's inputs are of no use any more; a request of many segments would fill its workers.
                if member.input_id is not None and (request := requests.get(member.request_id)) is not None:
                    self.forget_request(request, member.input_id, with_checkpoints=False)

    async def _wait_for_worker(
        self, requests: PlanRequests, plan: DispatchPlan, worker_id: WorkerId, call: PlanCall | None
    ) -> PlanReport:
        """The report of one worker of a plan; a failure when the worker is lost. Never raises: the scheduler would wait
        for the plan without end."""
        if call is None:
            self._abandon_groups(worker_id, plan)
            return PlanReport(plan.plan_id, "failed", error=f"{worker_id} is down")
        try:
            return await self._follow(requests, plan, worker_id, call)
        except WorkerError as error:
            return PlanReport(plan.plan_id, "failed", error=f"{worker_id}: {error}")
        except Exception as error:
            logger.exception("plan %d of %s failed in the engine", plan.plan_id, ", ".join(plan.request_ids))
            return PlanReport(plan.plan_id, "failed", error=f"{worker_id}: {type(error).__name__}")

    async def _follow(
        self, requests: PlanRequests, plan: DispatchPlan, worker_id: WorkerId, call: PlanCall
    ) -> PlanReport:
        """The report of one worker, when the requests have their outputs. Handles the notes before it."""
        async for item in call:
            if not isinstance(item, PlanReport):
                self._handle_note(requests, plan, worker_id, item)
                continue
            for request_id, outputs in (await self._collect_outputs(worker_id, item)).items():
                if (request := requests.get(request_id)) is not None:
                    request.outputs = outputs
            for request in requests.values():
                request.peak_memory_bytes = max(request.peak_memory_bytes, item.peak_memory_bytes)
                request.tiled |= item.tiled
            if worker_id == plan.leader:
                self._tell_steps(requests, list_last_steps(plan, item))
            return item
        raise WorkerError("ended without a report")

    async def _collect_outputs(self, worker_id: WorkerId, report: PlanReport) -> Mapping[str, tuple[Any, ...]]:
        """The outputs of a plan, by request: files, or references to them where they are large."""
        if report.outputs is not None or not report.num_outputs:
            return report.outputs or {}
        references = self._fleet.get_handle(worker_id).collect_outputs(report.plan_id)
        return await collect_references(references, report.num_outputs)

    def _handle_note(self, requests: PlanRequests, plan: DispatchPlan, worker_id: WorkerId, note: PlanNote) -> None:
        match note:
            case ProgressNote():
                self._tell_steps(requests, note.steps)
            case CheckpointNote():
                if plan.saves is not None:
                    spans = tuple(span.shift(-self._clock_offset_s) for span in note.spans)
                    self._post(ev.CheckpointSaved(plan.plan_id, note.num_steps, plan.saves.keeper, spans))
            case ReplicaLoad():
                self._post(
                    ev.ReplicaLoaded(worker_id, note.loaded, note.evicted, note.source, note.num_bytes, note.seconds)
                )

    def _tell_steps(self, requests: PlanRequests, steps: Iterable[tuple[str, int]]) -> None:
        for request_id, steps_done in steps:
            if (request := requests.get(request_id)) is not None:
                self._on_step(request, steps_done)

    def _abandon_groups(self, worker_id: WorkerId, plan: DispatchPlan) -> None:
        """Tell the groups of a plan in the name of a worker that cannot do it itself that it will not come."""
        rank = plan.workers.index(worker_id)
        try:
            for size, group in plan.groups.items():
                if rank < size:
                    self._abandon(group, rank, plan.plan_id)
        except RuntimeError as error:  # raised by the store: the others wait for their timeout then
            logger.warning("the groups of plan %d do not learn that %s is lost: %s", plan.plan_id, worker_id, error)
