"""The scheduler: a pure state machine. Events go in, effects come out, time is an argument.

No I/O, no clock, no randomness, no logging: the live and the simulated engine drive the same object, and a log of
its events replayed through a fresh one gives the same effects (`tridentserve.decisions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tridentserve import events as ev
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ProfileError
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica, WorkerId
from tridentserve.protocols import Assignment, Dispatcher, PendingRequest, StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.stages import Stage
from tridentserve.worker_pool import WorkerPool

# TridentServe, arXiv 2510.02838, section 8.1.
DEFAULT_SLO_SCALE = 2.5


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """`slo_scale`: per model, the default SLO as a multiple of the latency at the optimal degrees; 2.5, as in the
    paper, for others. `max_retries`: how often a request starts again after a failed plan or a lost worker."""

    slo_scale: Mapping[str, float] = field(default_factory=dict)
    max_retries: int = 2


@dataclass(frozen=True, slots=True)
class _Leg:
    """Consecutive stages of a request on one set of workers: a dispatch plan that is not due yet."""

    stages: tuple[Stage, ...]
    workers: tuple[WorkerId, ...]


@dataclass(slots=True)
class _Request:
    """A request that has not ended. It is pending while `plan` is None."""

    spec: RequestSpec
    arrival_s: float
    slo_s: float
    retries: int = 0
    plan: DispatchPlan | None = None
    legs: list[_Leg] = field(default_factory=list)
    # The plan whose outputs the next leg takes; None before the first.
    done: DispatchPlan | None = None

    @property
    def deadline_s(self) -> float:
        return self.arrival_s + self.slo_s


class Scheduler:
    """Decides which plans run. One object for the live and the simulated engine."""

    def __init__(
        self,
        workers: Sequence[WorkerSpec],
        placement: PlacementPlan,
        times: StageTimes,
        dispatcher: Dispatcher,
        options: SchedulerOptions | None = None,
    ) -> None:
        self._pool = WorkerPool(workers, placement)
        self._times = times
        self._dispatcher = dispatcher
        self._options = options or SchedulerOptions()
        self._requests: dict[str, _Request] = {}
        # Plans given to workers and not reported yet, also those of requests that have ended since.
        self._plans: dict[int, DispatchPlan] = {}
        self._last_plan_id = 0

    @property
    def num_pending(self) -> int:
        """Requests that wait for a dispatch."""
        return sum(request.plan is None for request in self._requests.values())

    def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        """Take in one event. Reports of plans that are unknown (reported already) are ignored."""
        match event:
            case ev.RequestArrived():
                return self._arrived(event.spec, now_s)
            case ev.RequestCancelled():
                return self._cancelled(event.request_id)
            case ev.StageFinished():
                return self._finished(event, now_s)
            case ev.PlanStopped():
                self._end_plan(event.plan_id, now_s)
                return []
            case ev.PlanFailed():
                return self._failed(event, now_s)
            case ev.WorkerJoined():
                self._pool.join(event.worker, event.incarnation)
                return []
            case ev.WorkerLost():
                self._pool.lose(event.worker_id)
                return []
            case ev.Tick():
                return self._tick(now_s)

    # Requests come and go.

    def _arrived(self, spec: RequestSpec, now_s: float) -> list[ev.Effect]:
        if spec.request_id in self._requests:
            return []  # the engine lets clients of the same id join; nothing new to decide
        why_not = self._dispatcher.can_ever_run(spec, self._pool.views_when_idle())
        if why_not is not None:
            return [ev.Reject(spec.request_id, "invalid_request", why_not)]
        try:
            slo_s = self._slo_s(spec)
        except ProfileError as error:
            return [ev.Reject(spec.request_id, "invalid_request", str(error))]
        self._requests[spec.request_id] = _Request(spec, arrival_s=now_s, slo_s=slo_s)
        return []

    def _slo_s(self, spec: RequestSpec) -> float:
        if spec.slo_s is not None:
            return spec.slo_s
        return self._options.slo_scale.get(spec.model, DEFAULT_SLO_SCALE) * self._optimal_latency_s(spec)

    def _cancelled(self, request_id: str) -> list[ev.Effect]:
        request = self._requests.get(request_id)
        if request is None:
            return []
        effects: list[ev.Effect] = []
        if request.plan is not None:
            effects.append(ev.Abort(request_id, request.plan.plan_id, "the client has gone"))
        return [*effects, self._reject(request, "cancelled", "the request was cancelled")]

    def _reject(self, request: _Request, code: str, reason: str) -> ev.Reject:
        self._forget(request)
        return ev.Reject(request.spec.request_id, code, reason)

    def _forget(self, request: _Request) -> None:
        self._pool.release(request.spec.request_id)
        del self._requests[request.spec.request_id]

    # Requests are dispatched.

    def _tick(self, now_s: float) -> list[ev.Effect]:
        pending = [
            PendingRequest(request.spec, request.arrival_s, request.deadline_s)
            for request in self._requests.values()
            if request.plan is None
        ]
        if not pending:
            return []
        assignments = self._dispatcher.dispatch(pending, self._pool.views(now_s), now_s)
        return [self._start(assignment, now_s) for assignment in assignments]

    def _start(self, assignment: Assignment, now_s: float) -> ev.Effect:
        request = self._requests[assignment.request_id]
        request.legs = _legs(assignment)
        request.done = None
        self._pool.reserve(
            assignment.diffuse, assignment.request_id, self._diffuse_end_s(request.spec, assignment, now_s)
        )
        for leg in request.legs[1:]:
            if Stage.DIFFUSE not in leg.stages:
                seconds = sum(self._stage_s(request.spec, stage, 1) for stage in leg.stages)
                self._pool.promise(leg.workers, assignment.request_id, seconds)
        return self._run_next_leg(request, now_s, assignment.reason)

    def _run_next_leg(self, request: _Request, now_s: float, reason: str) -> ev.Effect:
        leg = request.legs.pop(0)
        if not self._pool.all_alive(leg.workers):
            replacement = self._other_worker(request.spec.model, leg, now_s)
            if replacement is None:
                return self._again(request, f"{'+'.join(leg.workers)} was lost before the plan started")
            leg = replacement
        self._last_plan_id += 1
        plan = DispatchPlan(
            plan_id=self._last_plan_id,
            request_id=request.spec.request_id,
            model=request.spec.model,
            stages=leg.stages,
            workers=leg.workers,
            steps=(0, request.spec.num_inference_steps) if Stage.DIFFUSE in leg.stages else None,
            group=self._pool.group_name(leg.workers) if len(leg.workers) > 1 else None,
            input_id=request.done.plan_id if request.done else None,
            source=request.done.leader if request.done else None,
            push_to=request.legs[0].workers[0] if request.legs else None,
        )
        request.plan = plan
        self._plans[plan.plan_id] = plan
        self._pool.start(plan, self._expected_s(plan, request.spec), now_s)
        return ev.Run(plan, reason)

    def _other_worker(self, model: str, leg: _Leg, now_s: float) -> _Leg | None:
        """A lone auxiliary stage can go to any worker that holds it; D, with its reserved workers, cannot."""
        if len(leg.stages) > 1 or leg.stages[0] is Stage.DIFFUSE:
            return None
        holders = self._pool.holders(Replica(model, leg.stages[0]), like=leg.workers[0])
        if not holders:
            return None
        return _Leg(leg.stages, (min(holders, key=lambda worker: (self._pool.free_at_s(worker, now_s), worker)),))

    def _again(self, request: _Request, why: str) -> ev.Effect:
        """Back to the queue, from the start, unless that has happened too often."""
        request.retries += 1
        if request.retries > self._options.max_retries:
            return self._reject(request, "worker_failed", f"gave up after {self._options.max_retries} retries: {why}")
        self._pool.release(request.spec.request_id)
        request.plan, request.done, request.legs = None, None, []
        return ev.Requeue(request.spec.request_id, why)

    # Plans are reported.

    def _end_plan(self, plan_id: int, now_s: float) -> _Request | None:
        """Free a plan's workers. Returns its request when that still waits for this plan."""
        plan = self._plans.pop(plan_id, None)
        if plan is None:
            return None
        self._pool.end(plan, now_s)
        request = self._requests.get(plan.request_id)
        return request if request is not None and request.plan == plan else None

    def _finished(self, event: ev.StageFinished, now_s: float) -> list[ev.Effect]:
        plan = self._plans.get(event.plan_id)
        request = self._end_plan(event.plan_id, now_s)
        if plan is None or request is None:
            return []
        self._observe(plan, request.spec, event.spans)
        if Stage.DIFFUSE in plan.stages:
            self._pool.release(request.spec.request_id)
        request.done = plan
        if request.legs:
            stages = "".join(stage.letter for stage in plan.stages)
            return [self._run_next_leg(request, now_s, f"{stages} of plan {plan.plan_id} is done")]
        self._forget(request)
        latency_s = now_s - request.arrival_s
        verdict = "in time" if latency_s <= request.slo_s else f"late by {latency_s - request.slo_s:.2f} s"
        return [ev.Finish(request.spec.request_id, latency_s, request.slo_s, verdict)]

    def _failed(self, event: ev.PlanFailed, now_s: float) -> list[ev.Effect]:
        plan = self._plans.get(event.plan_id)
        request = self._end_plan(event.plan_id, now_s)
        if plan is not None and plan.group is not None:
            self._pool.break_group(plan.workers)
        if request is None:
            return []
        if not event.retry:
            return [self._reject(request, event.code, event.error)]
        return [self._again(request, event.error)]

    def _observe(self, plan: DispatchPlan, spec: RequestSpec, spans: Sequence[ev.StageSpan]) -> None:
        for span in spans:
            is_diffuse = span.stage is Stage.DIFFUSE
            degree = plan.degree if is_diffuse else 1  # E and C run on the leader
            seconds = span.seconds / spec.num_inference_steps if is_diffuse else span.seconds
            self._times.observe(spec.model, span.stage, spec.shape, degree, spec.num_outputs, seconds)

    # Expectations.

    def _expected_s(self, plan: DispatchPlan, spec: RequestSpec) -> float:
        return sum(self._stage_s(spec, stage, plan.degree if stage is Stage.DIFFUSE else 1) for stage in plan.stages)

    def _optimal_latency_s(self, spec: RequestSpec) -> float:
        """Latency with every stage at its optimal degree and no waiting: the base of the default SLO (section 8.1)."""
        return sum(
            self._stage_s(spec, stage, self._times.optimal_degree(spec.model, stage, spec.shape)) for stage in Stage
        )

    def _diffuse_end_s(self, spec: RequestSpec, assignment: Assignment, now_s: float) -> float:
        begin_s = max(self._pool.free_at_s(worker, now_s) for worker in assignment.encode)
        encode_s = self._stage_s(spec, Stage.ENCODE, 1)
        return begin_s + encode_s + self._stage_s(spec, Stage.DIFFUSE, len(assignment.diffuse))

    def _stage_s(self, spec: RequestSpec, stage: Stage, degree: int) -> float:
        seconds = self._times.seconds(spec.model, stage, spec.shape, degree, spec.num_outputs)
        return seconds * spec.num_inference_steps if stage is Stage.DIFFUSE else seconds


def _legs(assignment: Assignment) -> list[_Leg]:
    """Merge consecutive stages that have the same workers ("merging execute", section 5.2)."""
    legs: list[_Leg] = []
    for stage, workers in (
        (Stage.ENCODE, assignment.encode),
        (Stage.DIFFUSE, assignment.diffuse),
        (Stage.DECODE, assignment.decode),
    ):
        if legs and legs[-1].workers == workers:
            legs[-1] = _Leg((*legs[-1].stages, stage), workers)
        else:
            legs.append(_Leg((stage,), workers))
    return legs
