"""Gives the scheduler's plans to the workers, and reports their results to the scheduler and the clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tridentserve.engine.live.client_requests import ClientRequest, ClientRequests
from tridentserve.engine.live.fleet import WorkerFleet
from tridentserve.engine.live.messages import (
    CheckpointNote,
    ComputedNote,
    PlanNote,
    PlanReport,
    PreviewNote,
    ProgressNote,
    ReplicaLoad,
)
from tridentserve.engine.live.plan_calls import (
    PeakEstimator,
    build_plan_event,
    collect_references,
    list_last_steps,
    select_inputs,
)
from tridentserve.engine.live.worker_handle import PlanItem
from tridentserve.errors import WorkerError
from tridentserve.plans import DispatchPlan, WorkerId
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.watching.cluster_state import HandoffLevel

logger = logging.getLogger(__name__)

# The requests of a plan that had not ended when it was sent, by key.
PlanRequests = Mapping[str, ClientRequest]


@dataclass(slots=True, eq=False)
class _GivenPlan:
    """A plan that has been given to its workers."""

    plan: DispatchPlan
    requests: PlanRequests
    reports: list[PlanReport | None]
    """The reports that have come, by rank."""


class PlanDriver:
    """Lives in the engine's event loop."""

    def __init__(
        self,
        fleet: WorkerFleet,
        requests: ClientRequests,
        post: Callable[[ev.Event], None],
        on_step: Callable[[ClientRequest, int], None],
        on_preview: Callable[[ClientRequest, PreviewNote], None],
        abandon: Callable[[str, int, int], None],
        clock_offset_s: float,
        peaks: PeakEstimator,
    ) -> None:
        """`post` gives the scheduler an event; `on_step(request, steps_done)` is called for each denoising step of a
        request with watchers, some time after it, and for the last step of each plan, and `on_preview(request, note)`
        for each preview; `abandon(group, rank, plan_id)` tells the members of a process group that one of them is gone.
        The scheduler's time plus `clock_offset_s` is the Unix clock's."""
        self._fleet = fleet
        self._requests = requests
        self._post = post
        self._on_step = on_step
        self._on_preview = on_preview
        self._abandon = abandon
        self._clock_offset_s = clock_offset_s
        self.peaks = peaks
        """Memory that plans are expected to take."""
        self.handoff_levels: dict[WorkerId, HandoffLevel] = {}
        """The fill of each worker's handoff buffer at its latest report."""
        self._plans: dict[int, _GivenPlan] = {}  # given to workers, not reported yet
        self._tasks: set[asyncio.Task[None]] = set()

    def start_plan(self, plan: DispatchPlan) -> None:
        """Give a plan to its workers."""
        found = ((name, self._requests.find_unfinished(name)) for name in plan.request_ids)
        requests = {name: request for name, request in found if request is not None}
        given = self._plans[plan.plan_id] = _GivenPlan(plan, requests, [None] * plan.degree)
        for member in plan.members:
            if (request := requests.get(member.request_id)) is not None:
                request.add_plan(plan, member)
        is_watched = any(request.watchers for request in requests.values())
        # Calls are made here, in the order of the effects, before anything is awaited: they give out the turns.
        peaks = self.peaks.estimate(plan, [request.spec for request in requests.values()])
        absent = []
        for rank, (worker_id, peak) in enumerate(zip(plan.workers, peaks, strict=True)):
            inputs, take = select_inputs(plan, requests, worker_id), partial(self._take, given, rank)
            if not self._fleet.run_plan(worker_id, plan, inputs, take, peak, is_watched):
                absent.append(rank)
        for rank in absent:
            worker_id = plan.workers[rank]
            self._abandon_groups(worker_id, plan)
            self._note_report(given, rank, _make_failure(plan, f"{worker_id} is down"))

    def stop_plan(self, plan_id: int) -> None:
        """Stop a plan: its leader has all its workers stop at one step boundary."""
        if (given := self._plans.get(plan_id)) is not None:
            for leader in self._fleet.list_handles([given.plan.leader]):
                leader.stop_plan(plan_id)

    def pause_plan(self, plan_id: int) -> None:
        """Pause a plan: its leader has all its workers pause at one step boundary."""
        if (given := self._plans.get(plan_id)) is not None:
            for leader in self._fleet.list_handles([given.plan.leader]):
                leader.pause_plan(plan_id)

    def watch_request(self, request: ClientRequest) -> None:
        """A client wants to hear of the steps of a request, and none did before."""
        for given in self._plans.values():  # one that has been sent ahead may wait behind the one that runs
            if request.key in given.requests:
                for leader in self._fleet.list_handles([given.plan.leader]):
                    leader.watch_plan(given.plan.plan_id)

    def forget_request(self, request: ClientRequest, last_plan_id: int, with_checkpoints: bool = True) -> None:
        """Have the workers drop what they keep of a request's plans up to `last_plan_id`; a worker that is lost keeps
        nothing."""
        for worker in self._fleet.list_handles(request.workers):
            worker.forget_request(request.key, last_plan_id, with_checkpoints)

    def abandon_worker(self, worker_id: WorkerId) -> None:
        """A worker is lost: the other workers of its plans must not wait for it."""
        for given in self._plans.values():
            if worker_id in given.plan.workers:
                self._abandon_groups(worker_id, given.plan)

    def _take(self, given: _GivenPlan, rank: int, item: PlanItem) -> None:
        """Something comes of a plan on one of its workers. Never raises: the scheduler would wait for the plan without
        end."""
        worker_id = given.plan.workers[rank]
        try:
            if isinstance(item, WorkerError):
                self._note_report(given, rank, _make_failure(given.plan, f"{worker_id}: {item}"))
            elif not isinstance(item, PlanReport):
                self._handle_note(given, worker_id, item)
            elif item.outputs is None and item.num_outputs:
                self._begin(self._collect_outputs(given, rank, item))
            else:
                self._take_report(given, rank, item, item.outputs or {})
        except Exception as error:
            self._give_up(given, rank, error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _collect_outputs(self, given: _GivenPlan, rank: int, report: PlanReport) -> None:
        """Fetch references to the outputs of a plan that are large."""
        worker_id = given.plan.workers[rank]
        try:
            references = self._fleet.get_handle(worker_id).collect_outputs(report.plan_id)
            outputs = await collect_references(references, report.num_outputs)
            self._take_report(given, rank, report, outputs)
        except WorkerError as error:
            self._note_report(given, rank, _make_failure(given.plan, f"{worker_id}: {error}"))
        except Exception as error:
            self._give_up(given, rank, error)

    def _take_report(
        self, given: _GivenPlan, rank: int, report: PlanReport, outputs: Mapping[str, tuple[Any, ...]]
    ) -> None:
        """The report of one worker; the outputs of the plan are files, or references to them."""
        self.handoff_levels[given.plan.workers[rank]] = HandoffLevel(report.buffer_used_bytes, report.buffer_bytes)
        for request_id, files in outputs.items():
            if (request := given.requests.get(request_id)) is not None:
                request.outputs = files
        for request_id, skipped in report.skipped_steps.items():
            if (request := given.requests.get(request_id)) is not None:
                request.skipped_steps = skipped
        for request in given.requests.values():
            request.peak_memory_bytes = max(request.peak_memory_bytes, report.peak_memory_bytes)
            request.tiled |= report.tiled
        if rank == 0:
            self._tell_steps(given.requests, list_last_steps(given.plan, report))
        self._note_report(given, rank, report)

    def _give_up(self, given: _GivenPlan, rank: int, error: Exception) -> None:
        plan = given.plan
        logger.error("plan %d of %s failed in the engine", plan.plan_id, ", ".join(plan.request_ids), exc_info=error)
        self._note_report(given, rank, _make_failure(plan, f"{plan.workers[rank]}: {type(error).__name__}"))

    def _note_report(self, given: _GivenPlan, rank: int, report: PlanReport) -> None:
        """One worker of a plan has ended it. When all have, the scheduler hears how it ended."""
        if given.reports[rank] is not None:
            return
        given.reports[rank] = report
        reports = [found for found in given.reports if found is not None]
        plan = given.plan
        if report.is_device_broken:
            self._fleet.end_broken(plan.workers[rank])
        if report.outcome == "failed":
            others = [worker for worker, found in zip(plan.workers, given.reports, strict=True) if found is None]
            for other in self._fleet.list_handles(others):  # they may be waiting for it in a collective
                other.abort_groups_of_plan(plan.plan_id)
            for worker_id in others:  # or it may have failed because one of them hangs
                self._begin(self._fleet.end_if_silent(worker_id))
        if len(reports) < plan.degree:
            return
        del self._plans[plan.plan_id]
        event = build_plan_event(plan, reports, self._clock_offset_s)
        self._post(event)
        if isinstance(event, ev.StageFinished):
            for member in plan.members:
                # The plan's inputs are of no use any more; a request of many segments would fill its workers.
                if member.input_id is None or (member.inherited and member.request_id not in reports[0].taken_steps):
                    continue  # or it was not part of this plan
                if (request := given.requests.get(member.request_id)) is not None:
                    self.forget_request(request, member.input_id, with_checkpoints=False)

    def _handle_note(self, given: _GivenPlan, worker_id: WorkerId, note: PlanNote) -> None:
        plan = given.plan
        match note:
            case ProgressNote():
                self._tell_steps(given.requests, note.steps)
            case PreviewNote():
                if (request := given.requests.get(note.request_id)) is not None:
                    self._on_preview(request, note)
            case CheckpointNote():
                if plan.saves is not None:
                    spans = tuple(span.shift(-self._clock_offset_s) for span in note.spans)
                    self._post(ev.CheckpointSaved(plan.plan_id, note.num_steps, plan.saves.keeper, spans))
            case ComputedNote():
                self._post(ev.PlanComputed(plan.plan_id))
            case ReplicaLoad():
                self._post(note.make_event(worker_id))

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


def _make_failure(plan: DispatchPlan, error: str) -> PlanReport:
    return PlanReport(plan.plan_id, "failed", error=error)
