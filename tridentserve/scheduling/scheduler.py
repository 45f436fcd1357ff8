"""The scheduler: a pure state machine. Events go in, effects come out, time is an argument.

No I/O, no clock, no randomness, no logging: the live and the simulated engine drive the same object, and a log of
its events replayed through a fresh one gives the same effects (`tridentserve.scheduling.decision_log`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ProfileError, TridentServeError
from tridentserve.options import options
from tridentserve.plans import DispatchPlan, PlacementPlan, PlanMember, Replica
from tridentserve.protocols import (
    Assignment,
    ClusterView,
    Dispatcher,
    Preemption,
    Refusal,
    Replanner,
    RunningRequest,
    StageTimes,
)
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.checkpoint_schedule import CheckpointSchedule
from tridentserve.scheduling.decode_queue import DecodeOrder, DecodeQueue, elsewhere, usable
from tridentserve.scheduling.encode_queue import EncodeQueue
from tridentserve.scheduling.estimation.expected_times import ExpectedTimes
from tridentserve.scheduling.ledger import Ledger
from tridentserve.scheduling.model_states import ModelStates
from tridentserve.scheduling.runs import KeptOutput, LazyViews, Leg, Request, Run, legs_of
from tridentserve.scheduling.worker_pool import WorkerPool
from tridentserve.stages import Stage


class PolicyError(TridentServeError):
    """A dispatcher or replanner has failed. `effects`: what the scheduler had decided in this tick before."""

    code = "policy_failed"

    def __init__(self, message: str, effects: Sequence[ev.Effect] = ()) -> None:
        super().__init__(message)
        self.effects = list(effects)


@options
class SchedulerOptions:
    """What the scheduler does by itself, whatever the policy."""

    slo_scale: Mapping[str, float] = Field(
        default_factory=dict,
        description="Default SLO of each model, as a multiple of the latency at the optimal degrees; models without an "
        "entry have 2.5, as in the paper.",
    )
    max_retries: int = Field(
        default=2, ge=0, description="How often a request starts again after a failed plan or a lost worker."
    )
    decode_order: DecodeOrder = Field(
        default="urgent",
        description="Which C that is due goes first to an auxiliary: the most urgent, the first or the shortest.",
    )
    checkpoint_s: float = Field(
        default=1.0,
        ge=0,
        description="Seconds of denoising between two checkpoints of a request's state on another worker, which is "
        "about what is lost with a worker; with 0 no checkpoints are made and requests of a lost worker start again.",
    )
    checkpoint_steps: int | None = Field(
        default=None,
        ge=1,
        description="Number of denoising steps between two checkpoints, instead of the seconds; it has no effect where "
        "these are 0.",
    )


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
        options = options or SchedulerOptions()
        self._pool = WorkerPool(workers, placement)
        self._ledger = Ledger(self._pool, options.max_retries)
        self._models = ModelStates(self._ledger, self._pool)
        self._times = ExpectedTimes(times, self._pool, options.slo_scale, replanner)
        self._dispatcher = dispatcher
        self._replanner = replanner
        self._encodes = EncodeQueue(self._pool, times, lambda plan_id: self._ledger.plan(plan_id) is not None)
        self._decodes = DecodeQueue(self._pool, times, options.decode_order)
        self._keepers = CheckpointSchedule(self._pool, options.checkpoint_s, options.checkpoint_steps)
        # Why requests of a kind can never run, None where they can; until the placement changes.
        self._why_not: dict[tuple[str, object, int], str | None] = {}

    @property
    def num_pending(self) -> int:
        """Requests that wait for a dispatch."""
        return len(self._ledger.pending)

    def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        """Take in one event. Reports of plans that are unknown (reported already) are ignored. Raises `PolicyError`
        when a tick's policy fails: what it holds has been decided before, the next tick may do better."""
        effects = self._take_in(event, now_s)
        if isinstance(event, ev.CheckpointSaved):
            return effects  # it moves nobody
        for runs, leg, reason in self._encodes.due(now_s):
            effects += self._send_or_again(runs, leg, now_s, reason)
        for run, leg, reason in self._decodes.due(now_s):
            effects += self._send_or_again([run], leg, now_s, reason)
        return effects + self._models.due()

    def _take_in(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        match event:
            case ev.RequestArrived():
                return self._arrived(event.spec, now_s)
            case ev.RequestCancelled():
                return self._cancelled(event.request_id)
            case ev.StageFinished():
                return self._finished(event, now_s)
            case ev.CheckpointSaved():
                self._ledger.saved(event)
                return []
            case ev.PlanStopped():
                self._ledger.end_plan(event.plan_id, now_s)
                return []
            case ev.PlanFailed():
                return self._failed(event, now_s)
            case ev.WorkerJoined():
                self._pool.join(event.worker, event.incarnation)
                return []
            case ev.WorkerLost():
                return self._ledger.lose_worker(event.worker_id, event.error)
            case ev.ReplicaLoaded():
                self._pool.loaded(event.worker_id, event.loaded, event.evicted)
                return []
            case ev.ModelAdded():
                return self._model_added(event)
            case ev.ModelDraining():
                self._models.draining(event.model)
                return []
            case ev.ModelRemoved():
                return self._model_removed(event)
            case ev.Tick():
                return self._tick(now_s)

    # Requests come and go.

    def _arrived(self, spec: RequestSpec, now_s: float) -> list[ev.Effect]:
        if spec.request_id in self._ledger.requests:
            return []  # the engine lets clients of the same id join; nothing new to decide
        if (refusal := self._models.refusal(spec.request_id, spec.model)) is not None:
            return [refusal]
        key = (spec.model, spec.shape, spec.num_outputs)
        if key not in self._why_not:
            self._why_not[key] = self._dispatcher.can_ever_run(spec, self._pool.views_when_idle())
        if (why_not := self._why_not[key]) is not None:
            return [ev.Reject(spec.request_id, "invalid_request", why_not)]
        try:
            slo_s = self._times.slo_s(spec)
        except ProfileError as error:
            return [ev.Reject(spec.request_id, "invalid_request", str(error))]
        request = Request(spec, arrival_s=now_s - spec.waited_s, slo_s=slo_s)
        self._ledger.requests[spec.request_id] = request
        self._ledger.wait(request)
        if self._replanner is not None:
            self._replanner.arrived(spec, now_s)
        return []

    def _cancelled(self, request_id: str) -> list[ev.Effect]:
        request = self._ledger.requests.get(request_id)
        return self._end(request, "cancelled", "the request was cancelled") if request is not None else []

    def _end(self, request: Request, code: str, why: str) -> list[ev.Effect]:
        """A request ends without a result, whatever has become of it."""
        run, effects = request.run, list[ev.Effect]()
        if run is not None:
            run.requests.remove(request)
            if not run.requests:  # nobody else is in the batch
                self._ledger.end_run(run)
                if run.plan is not None and not self._ledger.is_wanted(run.plan):
                    effects.append(ev.Abort(request.spec.request_id, run.plan.plan_id, why))
        return [*effects, self._ledger.reject(request, code, why)]

    # Models come and go.

    def _model_added(self, event: ev.ModelAdded) -> list[ev.Effect]:
        self._models.added(event.model)
        self._times.set_slo_scale(event.model, event.slo_scale)
        if self._replanner is not None:
            self._replanner.expect(event.model, event.expected, event.window_s)
        return self._place(event.placement)

    def _model_removed(self, event: ev.ModelRemoved) -> list[ev.Effect]:
        effects = self._models.removed(event.model, self._end)
        if self._replanner is not None:
            self._replanner.forget(event.model)
        return effects + self._place(event.placement)

    def _place(self, plan: PlacementPlan | None) -> list[ev.Effect]:
        self._why_not.clear()
        if plan is None:
            return []
        self._pool.place(plan)
        return [ev.Place(plan, plan.reason)]

    # Requests are dispatched.

    def _tick(self, now_s: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        if self._replanner is not None:
            effects += self._place(self._proposed(self._replanner, now_s))
        if not self._ledger.pending:
            return effects
        running = LazyViews(lambda: self._running(now_s))
        view = ClusterView(now_s, list(self._ledger.pending.values()), running, self._pool.views())
        try:
            decisions = self._dispatcher.decide(view)
        except Exception as error:
            raise PolicyError(f"the dispatcher failed: {error!r}", effects) from error
        effects += (effect for item in decisions.refusals for effect in self._refused(item))
        effects += (effect for item in decisions.preemptions for effect in self._preempted(item))
        for assignment in decisions.assignments:
            if (fault := self._fault(assignment.request_ids)) is not None:
                raise PolicyError(f"the dispatcher assigned {', '.join(assignment.request_ids)}: {fault}", effects)
            effects += self._start(assignment, now_s)
        return effects

    def _fault(self, names: Sequence[str]) -> str | None:
        """Why requests cannot be assigned together; None where they can."""
        absent = [name for name in names if name not in self._ledger.pending]
        if absent:
            return f"{', '.join(absent)} {'does' if len(absent) == 1 else 'do'} not wait"
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        return f"{', '.join(twice)} more than once" if twice else None

    def _proposed(self, replanner: Replanner, now_s: float) -> PlacementPlan | None:
        try:
            return replanner.propose(self._pool.alive(), self._pool.placement, now_s)
        except Exception as error:
            raise PolicyError(f"the replanner failed: {error!r}") from error

    def _running(self, now_s: float) -> list[RunningRequest]:
        return [run.view(request, now_s) for run in self._ledger.runs.values() for request in run.requests]

    def _refused(self, refusal: Refusal) -> list[ev.Effect]:
        request = self._ledger.requests.get(refusal.request_id)
        if request is None or request.run is not None:
            return []
        return [self._ledger.reject(request, "deadline_missed", refusal.reason)]

    def _preempted(self, preemption: Preemption) -> list[ev.Effect]:
        request = self._ledger.requests.get(preemption.request_id)
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
        requests = [self._ledger.requests[request_id] for request_id in assignment.request_ids]
        try:
            run, promises = self._new_run(assignment, requests, now_s)
        except ProfileError as error:  # nothing has changed yet
            return [self._ledger.reject(request, "invalid_request", str(error)) for request in requests]
        self._ledger.begin_run(run)
        self._pool.reserve(assignment.diffuse, run.run_id, run.diffuse_end_s)
        for leg, seconds in promises:
            self._pool.promise(leg.workers, run.run_id, seconds)
        return self._run_next_leg(run, now_s, assignment.reason)

    def _new_run(
        self, assignment: Assignment, requests: list[Request], now_s: float
    ) -> tuple[Run, list[tuple[Leg, float]]]:
        """The run, and the seconds of its legs after D. `ProfileError` where those of any leg are not known."""
        left = min(request.steps_left for request in requests)
        num_steps = left if assignment.num_steps is None else min(assignment.num_steps, left)
        finishing = sum(request.steps_left == num_steps for request in requests)
        spec, batch = requests[0].spec, len(requests)
        step_s = self._times.step_s(spec, len(assignment.diffuse), batch)
        run = Run(
            run_id=self._ledger.new_id(),
            requests=requests,
            assignment=assignment,
            num_steps=num_steps,
            legs=legs_of(assignment, not all(request.encoded for request in requests), finishing),
            step_s=step_s,
            diffuse_end_s=now_s + num_steps * step_s,
        )
        self._times.leg_s(run.legs[0], run, batch)
        if Stage.DIFFUSE not in run.legs[0].stages:
            encode_s = self._times.encode_s(spec, len(assignment.encode), batch)
            run.diffuse_end_s += encode_s + max(self._pool.free_at_s(w, now_s) for w in assignment.encode) - now_s
        after = [leg for leg in run.legs[1:] if Stage.DIFFUSE not in leg.stages]
        return run, [(leg, self._times.leg_s(leg, run, finishing)) for leg in after]

    def _run_next_leg(self, run: Run, now_s: float, reason: str) -> list[ev.Effect]:
        leg, model = run.legs[0], run.spec.model
        if leg.stages == (Stage.DECODE,) and not self._pool.holds(leg.workers[0], Replica(model, Stage.DIFFUSE)):
            self._decodes.add(run, reason)
            return []
        if self._encodes.takes(run):
            self._encodes.add(run, self._times.leg_s(leg, run, len(run.requests)), reason)
            return []
        unit = self._times.unit(model, leg)
        where = leg if usable(self._pool, model, leg) else elsewhere(self._pool, model, leg, now_s, unit)
        return self._send_or_again([run], where, now_s, reason)

    def _send_or_again(self, runs: Sequence[Run], leg: Leg | None, now_s: float, reason: str) -> list[ev.Effect]:
        """The next leg of these runs on these workers; without any, their members start again."""
        if leg is None:
            return [effect for run in runs for effect in self._ledger.again(run, self._why_nowhere(run))]
        return self._send_leg(runs, leg, now_s, reason)

    def _why_nowhere(self, run: Run) -> str:
        """Why no workers can run the next leg of a run."""
        leg = run.legs[0]
        lost = [worker_id for worker_id in leg.workers if not self._pool.all_alive((worker_id,))]
        if lost:
            return f"{'+'.join(lost)} was lost before the plan started"
        return f"no worker holds {''.join(stage.letter for stage in leg.stages)} of {run.spec.model} any more"

    def _send_leg(self, runs: Sequence[Run], leg: Leg, now_s: float, reason: str) -> list[ev.Effect]:
        """One plan: of one run, or E of several."""
        run = max(runs, key=lambda run: run.spec.num_outputs)
        diffuses = Stage.DIFFUSE in leg.stages
        members: list[PlanMember] = []
        for each in runs:
            each.legs.pop(0)
            num_steps = each.num_steps if diffuses else None
            push_to = each.legs[0].workers[0] if each.legs else None
            members += [request.member(num_steps, push_to) for request in each.requests if _takes_part(request, leg)]
        plan = DispatchPlan(
            plan_id=self._ledger.new_id(),
            model=run.spec.model,
            stages=leg.stages,
            workers=leg.workers,
            members=tuple(members),
            group=self._pool.group_name(leg.workers) if len(leg.workers) > 1 else None,
            decode_degree=self._times.decode_degree(run.spec.model, leg),
            saves=self._keepers.saves(run, leg.workers, leg.workers[0]) if diffuses else None,
        )
        self._ledger.begin_plan(plan, runs)
        self._encodes.sent(plan)
        expected_s = self._times.leg_s(leg, run, len(members))
        if diffuses:
            run.diffuse_end_s = now_s + expected_s
        elif leg.stages == (Stage.DECODE,):
            self._pool.release(run.workers, run.run_id)
        self._pool.start(plan, expected_s, now_s)
        return [ev.RunPlan(plan, reason)]

    # Plans are reported.

    def _finished(self, event: ev.StageFinished, now_s: float) -> list[ev.Effect]:
        ended = self._ledger.end_plan(event.plan_id, now_s)
        if ended is None:
            return []
        plan, runs = ended
        num_steps = plan.num_steps if event.num_steps is None else event.num_steps
        self._times.observe(plan, max(runs, key=lambda run: run.spec.num_outputs), event.spans, num_steps)
        ran = [span.stage for span in event.spans]
        return [effect for run in runs for effect in self._go_on(plan, run, ran, num_steps, now_s)]

    def _go_on(
        self, plan: DispatchPlan, run: Run, ran: Sequence[Stage], num_steps: int, now_s: float
    ) -> list[ev.Effect]:
        """A run whose plan has ended well, after these stages and so many steps of D."""
        for request in run.requests:
            if _is_in(request, plan):
                request.encoded |= Stage.ENCODE in ran
                request.steps_done += num_steps
                if ran:
                    request.made_by = KeptOutput(plan.plan_id, plan.leader, request.steps_done)
        run.plan = None
        if Stage.DECODE in ran:
            effects = [self._finish(request, now_s) for request in run.requests if _is_in(request, plan)]
            run.requests = [request for request in run.requests if not _is_in(request, plan)]
            self._ledger.end_run(run)
            return effects
        if Stage.DIFFUSE in plan.stages:
            self._after_diffuse(plan, run)
        elif run.yielding:
            self._park(run, run.requests)
        if run.legs and run.requests:
            stages = "".join(stage.letter for stage in plan.stages)
            return self._run_next_leg(run, now_s, f"{stages} of plan {plan.plan_id} is done")
        self._ledger.end_run(run)
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
            self._ledger.wait(request)

    def _finish(self, request: Request, now_s: float) -> ev.Effect:
        self._ledger.forget(request)
        latency_s = now_s - request.arrival_s
        verdict = "in time" if latency_s <= request.slo_s else f"late by {latency_s - request.slo_s:.2f} s"
        return ev.Finish(request.spec.request_id, latency_s, request.slo_s, verdict)

    def _failed(self, event: ev.PlanFailed, now_s: float) -> list[ev.Effect]:
        known = self._ledger.plan(event.plan_id)
        ended = self._ledger.end_plan(event.plan_id, now_s)
        if known is not None and known.group is not None:
            self._pool.break_group(known.workers)
        if ended is None:
            return []
        plan, runs = ended
        effects: list[ev.Effect] = []
        for run in runs:
            if len(plan.members) > 1:
                effects += self._ledger.apart(run, event.error, is_retry=event.retry)
            elif event.retry:
                effects += self._ledger.again(run, event.error)
            else:
                self._ledger.end_run(run)
                effects += [self._ledger.reject(request, event.code, event.error) for request in run.requests]
        return effects


def _is_in(request: Request, plan: DispatchPlan) -> bool:
    return request.spec.request_id in plan.request_ids


def _takes_part(request: Request, leg: Leg) -> bool:
    """E is for members without a condition, C for those that have done all steps (when D is not before it)."""
    if leg.stages == (Stage.ENCODE,):
        return not request.encoded
    return leg.stages != (Stage.DECODE,) or request.steps_left == 0
