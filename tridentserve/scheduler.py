"""The scheduler: a pure state machine. Events go in, effects come out, time is an argument.

No I/O, no clock, no randomness, no logging: the live and the simulated engine drive the same object, and a log of
its events replayed through a fresh one gives the same effects (`tridentserve.decisions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tridentserve import events as ev
from tridentserve.auxiliary_legs import DecodeOrder, DecodeQueue, elsewhere, usable
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ProfileError
from tridentserve.estimates import stage_degree, stage_seconds
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica
from tridentserve.protocols import (
    Assignment,
    ClusterView,
    Dispatcher,
    PendingRequest,
    Preemption,
    Refusal,
    Replanner,
    RunningRequest,
    StageReport,
    StageTimes,
)
from tridentserve.requests import RequestSpec
from tridentserve.runs import LazyViews, Leg, Request, Run, legs_of
from tridentserve.stages import Stage
from tridentserve.worker_pool import WorkerPool

# TridentServe, arXiv 2510.02838, section 8.1.
DEFAULT_SLO_SCALE = 2.5


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """`slo_scale`: per model, the default SLO as a multiple of the latency at the optimal degrees; 2.5, as in the
    paper, for others. `max_retries`: how often a request starts again after a failed plan or a lost worker.
    `decode_order`: which C that is due goes first to an auxiliary: the most urgent, the first or the shortest."""

    slo_scale: Mapping[str, float] = field(default_factory=dict)
    max_retries: int = 2
    decode_order: DecodeOrder = "urgent"


class Scheduler:
    """Decides which plans run. One object for the live and the simulated engine."""

    def __init__(
        self,
        workers: Sequence[WorkerSpec],
        placement: PlacementPlan,
        times: StageTimes,
        dispatcher: Dispatcher,
        options: SchedulerOptions | None = None,
        replanner: Replanner | None = None,
    ) -> None:
        """Without a replanner the placement stays as it is."""
        self._pool = WorkerPool(workers, placement)
        self._times = times
        self._dispatcher = dispatcher
        self._replanner = replanner
        self._options = options or SchedulerOptions()
        self._requests: dict[str, Request] = {}
        # Those that wait for a dispatch, as the dispatcher sees them.
        self._pending: dict[str, PendingRequest] = {}
        self._runs: dict[int, Run] = {}
        self._decodes = DecodeQueue(self._pool, times, self._options.decode_order)
        # Plans given to workers and not reported yet, with their runs; also those nobody waits for any more.
        self._plans: dict[int, tuple[DispatchPlan, Run]] = {}
        self._last_id = 0
        # Why requests of a kind can never run, None where they can; until the placement changes.
        self._why_not: dict[tuple[str, object, int], str | None] = {}

    @property
    def num_pending(self) -> int:
        """Requests that wait for a dispatch."""
        return len(self._pending)

    def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        """Take in one event. Reports of plans that are unknown (reported already) are ignored."""
        effects = self._take_in(event, now_s)
        for run, leg, reason in self._decodes.due(now_s):
            effects += self._send_or_again(run, leg, now_s, reason)
        return effects

    def _take_in(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
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
                return self._lost(event)
            case ev.ReplicaLoaded():
                self._pool.loaded(event.worker_id, event.loaded, event.evicted)
                return []
            case ev.Tick():
                return self._tick(now_s)

    # Requests come and go.

    def _arrived(self, spec: RequestSpec, now_s: float) -> list[ev.Effect]:
        if spec.request_id in self._requests:
            return []  # the engine lets clients of the same id join; nothing new to decide
        key = (spec.model, spec.shape, spec.num_outputs)
        if key not in self._why_not:
            self._why_not[key] = self._dispatcher.can_ever_run(spec, self._pool.views_when_idle())
        if (why_not := self._why_not[key]) is not None:
            return [ev.Reject(spec.request_id, "invalid_request", why_not)]
        try:
            slo_s = self._slo_s(spec)
        except ProfileError as error:
            return [ev.Reject(spec.request_id, "invalid_request", str(error))]
        request = Request(spec, arrival_s=now_s, slo_s=slo_s)
        self._requests[spec.request_id] = request
        self._wait(request)
        if self._replanner is not None:
            self._replanner.arrived(spec, now_s)
        return []

    def _slo_s(self, spec: RequestSpec) -> float:
        """Section 8.1: a multiple of the latency with every stage at its optimal degree and no waiting."""
        if spec.slo_s is not None:
            return spec.slo_s
        times = self._times
        optimal_s = sum(
            stage_seconds(times, spec, stage, times.optimal_degree(spec.model, stage, spec.shape)) for stage in Stage
        )
        return self._options.slo_scale.get(spec.model, DEFAULT_SLO_SCALE) * optimal_s

    def _cancelled(self, request_id: str) -> list[ev.Effect]:
        request = self._requests.get(request_id)
        if request is None:
            return []
        run, effects = request.run, list[ev.Effect]()
        if run is not None:
            run.requests.remove(request)
            if not run.requests:  # nobody else is in the batch
                effects += self._drop_run(run, "the client has gone", request_id)
        return [*effects, self._reject(request, "cancelled", "the request was cancelled")]

    def _drop_run(self, run: Run, why: str, request_id: str) -> list[ev.Effect]:
        self._end_run(run)
        return [ev.Abort(request_id, run.plan.plan_id, why)] if run.plan is not None else []

    def _wait(self, request: Request) -> None:
        request.run = None
        self._pending[request.spec.request_id] = request.pending()

    def _reject(self, request: Request, code: str, reason: str) -> ev.Reject:
        self._forget(request)
        return ev.Reject(request.spec.request_id, code, reason)

    def _forget(self, request: Request) -> None:
        self._pending.pop(request.spec.request_id, None)
        del self._requests[request.spec.request_id]

    # Requests are dispatched.

    def _tick(self, now_s: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        if self._replanner is not None:
            plan = self._replanner.propose(self._pool.alive(), self._pool.placement, now_s)
            if plan is not None:
                self._pool.place(plan)
                self._why_not.clear()
                effects.append(ev.Place(plan, plan.reason))
        if not self._pending:
            return effects
        running = LazyViews(lambda: self._running(now_s))
        decisions = self._dispatcher.decide(
            ClusterView(now_s, list(self._pending.values()), running, self._pool.views())
        )
        effects += (effect for item in decisions.refusals for effect in self._refused(item))
        effects += (effect for item in decisions.preemptions for effect in self._preempted(item))
        for assignment in decisions.assignments:
            effects += self._start(assignment, now_s)
        return effects

    def _running(self, now_s: float) -> list[RunningRequest]:
        return [run.view(request, now_s) for run in self._runs.values() for request in run.requests]

    def _refused(self, refusal: Refusal) -> list[ev.Effect]:
        request = self._requests.get(refusal.request_id)
        if request is None or request.run is not None:
            return []
        return [self._reject(request, "deadline_missed", refusal.reason)]

    def _preempted(self, preemption: Preemption) -> list[ev.Effect]:
        request = self._requests.get(preemption.request_id)
        run = request.run if request is not None else None
        if run is None or run.plan is None or run.yielding:
            return []
        if run.plan.stages == (Stage.DECODE,):
            return []  # nothing to gain: it is nearly done
        run.yielding = True
        if Stage.DIFFUSE not in run.plan.stages:
            run.legs.clear()  # E ends as planned, what follows is decided anew
        return [ev.Yield(run.plan.plan_id, preemption.reason)]

    def _start(self, assignment: Assignment, now_s: float) -> list[ev.Effect]:
        requests = [self._requests[request_id] for request_id in assignment.request_ids]
        left = min(request.steps_left for request in requests)
        num_steps = left if assignment.num_steps is None else min(assignment.num_steps, left)
        finishing = sum(request.steps_left == num_steps for request in requests)
        spec, batch = requests[0].spec, len(requests)
        degree = len(assignment.diffuse)
        step_s = stage_seconds(self._times, spec, Stage.DIFFUSE, degree, batch, 1)
        self._last_id += 1
        run = Run(
            run_id=self._last_id,
            requests=requests,
            assignment=assignment,
            num_steps=num_steps,
            legs=legs_of(assignment, not all(request.encoded for request in requests), finishing),
            step_s=step_s,
            diffuse_end_s=now_s + num_steps * step_s,
        )
        self._runs[run.run_id] = run
        for request in requests:
            del self._pending[request.spec.request_id]
            request.run = run
        if Stage.DIFFUSE not in run.legs[0].stages:
            encode_s = stage_seconds(self._times, spec, Stage.ENCODE, 1, batch)
            run.diffuse_end_s += encode_s + max(self._pool.free_at_s(w, now_s) for w in assignment.encode) - now_s
        self._pool.reserve(assignment.diffuse, run.run_id, run.diffuse_end_s)
        for leg in run.legs[1:]:
            if Stage.DIFFUSE not in leg.stages:
                self._pool.promise(leg.workers, run.run_id, self._expected_s(leg, run, finishing))
        return self._run_next_leg(run, now_s, assignment.reason)

    def _run_next_leg(self, run: Run, now_s: float, reason: str) -> list[ev.Effect]:
        leg, model = run.legs[0], run.spec.model
        if leg.stages == (Stage.DECODE,) and not self._pool.holds(leg.workers[0], Replica(model, Stage.DIFFUSE)):
            self._decodes.add(run, reason)
            return []
        where = leg if usable(self._pool, model, leg) else elsewhere(self._pool, model, leg, now_s)
        return self._send_or_again(run, where, now_s, reason)

    def _send_or_again(self, run: Run, leg: Leg | None, now_s: float, reason: str) -> list[ev.Effect]:
        """The run's next leg on these workers; without any, its members start again."""
        if leg is None:
            return self._again(run, f"{'+'.join(run.legs[0].workers)} was lost before the plan started")
        run.legs[0] = leg
        return self._send_leg(run, now_s, reason)

    def _send_leg(self, run: Run, now_s: float, reason: str) -> list[ev.Effect]:
        leg = run.legs.pop(0)
        diffuses = Stage.DIFFUSE in leg.stages
        members = [
            request.member(run.num_steps if diffuses else None) for request in run.requests if _takes_part(request, leg)
        ]
        self._last_id += 1
        plan = DispatchPlan(
            plan_id=self._last_id,
            model=run.spec.model,
            stages=leg.stages,
            workers=leg.workers,
            members=tuple(members),
            group=self._pool.group_name(leg.workers) if len(leg.workers) > 1 else None,
            push_to=run.legs[0].workers[0] if run.legs else None,
        )
        run.plan = plan
        self._plans[plan.plan_id] = (plan, run)
        expected_s = self._expected_s(leg, run, len(members))
        if diffuses:
            run.diffuse_end_s = now_s + expected_s
        elif leg.stages == (Stage.DECODE,):
            self._pool.release(run.workers, run.run_id)
        self._pool.start(plan, expected_s, now_s)
        return [ev.Run(plan, reason)]

    def _again(self, run: Run, why: str) -> list[ev.Effect]:
        """All members back to the queue, from their start, unless that has happened too often."""
        self._end_run(run)
        return [self._start_again(request, why) for request in run.requests]

    def _start_again(self, request: Request, why: str) -> ev.Effect:
        request.retries += 1
        if request.retries > self._options.max_retries:
            return self._reject(request, "worker_failed", f"gave up after {self._options.max_retries} retries: {why}")
        request.start_again()
        self._wait(request)
        return ev.Requeue(request.spec.request_id, why)

    def _end_run(self, run: Run) -> None:
        self._pool.release(run.workers, run.run_id)
        self._runs.pop(run.run_id, None)

    def _lost(self, event: ev.WorkerLost) -> list[ev.Effect]:
        """What waits and was kept there begins again; what runs there is reported plan by plan."""
        self._pool.lose(event.worker_id)
        kept = [name for name, pending in self._pending.items() if pending.held_by == event.worker_id]
        return [self._start_again(self._requests[name], event.error) for name in kept]

    # Plans are reported.

    def _end_plan(self, plan_id: int, now_s: float) -> tuple[DispatchPlan, Run] | None:
        """Free a plan's workers. Returns the plan and its run when somebody still waits for it."""
        plan, run = self._plans.pop(plan_id, (None, None))
        if plan is None or run is None:
            return None
        self._pool.end(plan, now_s)
        return (plan, run) if run.plan is plan and run.requests else None

    def _finished(self, event: ev.StageFinished, now_s: float) -> list[ev.Effect]:
        ended = self._end_plan(event.plan_id, now_s)
        if ended is None:
            return []
        plan, run = ended
        num_steps = plan.num_steps if event.num_steps is None else event.num_steps
        self._observe(plan, run, event.spans, num_steps)
        ran = [span.stage for span in event.spans]
        for request in run.requests:
            if request.spec.request_id in plan.request_ids:
                request.made_by = plan if ran else request.made_by
                request.encoded |= Stage.ENCODE in ran
                request.steps_done += num_steps
        run.plan = None
        if Stage.DECODE in ran:
            effects = [self._finish(request, now_s) for request in run.requests if _is_in(request, plan)]
            run.requests = [request for request in run.requests if not _is_in(request, plan)]
            self._end_run(run)
            return effects
        if Stage.DIFFUSE in plan.stages:
            self._after_diffuse(plan, run)
        elif run.yielding:
            self._park(run, run.requests)
        if run.legs and run.requests:
            stages = "".join(stage.letter for stage in plan.stages)
            return self._run_next_leg(run, now_s, f"{stages} of plan {plan.plan_id} is done")
        self._end_run(run)
        return []

    def _after_diffuse(self, plan: DispatchPlan, run: Run) -> None:
        """D's workers are free. Members with steps left wait for another dispatch, the others go on to C."""
        self._pool.free(run.assignment.diffuse, run.run_id)
        self._park(run, [request for request in run.requests if request.steps_left > 0])
        if run.requests and not run.legs:  # stopped when there was nothing left but C
            run.legs = [Leg((Stage.DECODE,), run.assignment.decode or plan.workers[:1])]

    def _park(self, run: Run, requests: Sequence[Request]) -> None:
        for request in list(requests):
            run.requests.remove(request)
            self._wait(request)

    def _finish(self, request: Request, now_s: float) -> ev.Effect:
        self._forget(request)
        latency_s = now_s - request.arrival_s
        verdict = "in time" if latency_s <= request.slo_s else f"late by {latency_s - request.slo_s:.2f} s"
        return ev.Finish(request.spec.request_id, latency_s, request.slo_s, verdict)

    def _failed(self, event: ev.PlanFailed, now_s: float) -> list[ev.Effect]:
        known = self._plans.get(event.plan_id)
        ended = self._end_plan(event.plan_id, now_s)
        if known is not None and known[0].group is not None:
            self._pool.break_group(known[0].workers)
        if ended is None:
            return []
        run = ended[1]
        if event.retry:
            return self._again(run, event.error)
        self._end_run(run)
        return [self._reject(request, event.code, event.error) for request in run.requests]

    def _observe(self, plan: DispatchPlan, run: Run, spans: Sequence[ev.StageSpan], num_steps: int) -> None:
        spec = run.spec
        kind = self._pool.kind_of(plan.leader, plan.model)
        batch = len(plan.members) * spec.num_outputs
        for span in spans:
            degree = stage_degree(self._times, spec.model, span.stage, plan.degree)
            calls = num_steps if span.stage is Stage.DIFFUSE else 1
            if calls:
                self._times.observe(spec.model, span.stage, spec.shape, degree, batch, span.seconds / calls)
            if self._replanner is not None and kind is not None:
                workers = plan.workers[:degree]
                size = len(plan.members)
                self._replanner.stage_finished(
                    StageReport(spec.model, span.stage, kind, spec.shape, size, workers, span.start_s, span.end_s)
                )

    def _expected_s(self, leg: Leg, run: Run, batch: int) -> float:
        """Seconds of a leg for so many members, loads of what its workers do not hold yet included."""
        model, degree = run.spec.model, len(leg.workers)
        replicas = [Replica(model, stage) for stage in leg.stages]
        load_s = max(
            sum(self._times.load_seconds(model, replica.stage) for replica in self._pool.missing(worker, replicas))
            for worker in leg.workers
        )
        return load_s + sum(
            stage_seconds(self._times, run.spec, stage, degree, batch, run.num_steps) for stage in leg.stages
        )


def _is_in(request: Request, plan: DispatchPlan) -> bool:
    return request.spec.request_id in plan.request_ids


def _takes_part(request: Request, leg: Leg) -> bool:
    """E is for members without a condition, C for those that have done all steps (when D is not before it)."""
    if leg.stages == (Stage.ENCODE,):
        return not request.encoded
    return leg.stages != (Stage.DECODE,) or request.steps_left == 0
