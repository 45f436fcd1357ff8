"""The scheduler: a pure state machine. Events go in, effects come out, time is an argument.

No I/O, no clock, no randomness, no logging: the live and the simulated engine drive the same object, and a log of
its events replayed through a fresh one gives the same effects (`tridentserve.scheduling.decision_log`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from tridentserve.cells.summary import CellSummary
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ProfileError, TridentServeError
from tridentserve.options import options
from tridentserve.plans import PlacementPlan, WorkerId
from tridentserve.protocols import (
    Assignment,
    ClusterView,
    Dispatcher,
    PendingRequest,
    Refusal,
    Replanner,
    RunningRequest,
    StageTimes,
)
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.estimation.expected_times import DEFAULT_SLO_SCALE, ExpectedTimes
from tridentserve.scheduling.model_states import ModelStates
from tridentserve.scheduling.prediction.less_work import find_less_work
from tridentserve.scheduling.prediction.predictor import Predictor, Quote, RequestOutlook
from tridentserve.scheduling.prediction.scene import SharingRules
from tridentserve.scheduling.runs.assignment_runner import AssignmentRunner
from tridentserve.scheduling.runs.auxiliary_queues import DecodeOrder, DecodeQueue, EncodeQueue, OtherPlaces
from tridentserve.scheduling.runs.checkpoint_schedule import CheckpointSchedule
from tridentserve.scheduling.runs.lazy_views import LazyViews
from tridentserve.scheduling.runs.ledger import Ledger
from tridentserve.scheduling.runs.request import Request
from tridentserve.scheduling.watching.cell_load import summarize_load
from tridentserve.scheduling.watching.cluster_state import ClusterState
from tridentserve.scheduling.watching.describing import describe_present
from tridentserve.scheduling.workers.detours import Detours
from tridentserve.scheduling.workers.fault_watch import FaultWatch
from tridentserve.scheduling.workers.shared_cores import SharedCores
from tridentserve.scheduling.workers.worker_pool import WorkerPool


class PolicyError(TridentServeError):
    """A dispatcher or replanner has failed. `effects`: what the scheduler had decided in this tick before."""

    code = "policy_failed"

    def __init__(self, message: str, effects: Sequence[ev.Effect] = ()) -> None:
        super().__init__(message)
        self.effects = list(effects)


@options
class SchedulerOptions:
    """The options of the scheduler that hold for every policy."""

    slo_scale: Mapping[str, float] = Field(
        default_factory=dict,
        description="Default SLO of each model, as a multiple of the latency at the optimal degrees; models without an "
        f"entry have {DEFAULT_SLO_SCALE:g}, as in the paper.",
    )
    max_retries: int = Field(
        default=2,
        ge=0,
        description="Most times that a request is put back into the queue after a failed plan or a lost worker. It "
        "resumes from its last state checkpoint, or starts again where there is none.",
    )
    max_worker_failures: int | None = Field(
        default=3,
        ge=1,
        description="Number of plans that a worker may fail one after another before it is set aside: it is given no "
        "others for a while, if others can run what waits. Only failures count whose requests have failed nowhere "
        "else, while other workers run plans. null: none is ever set aside.",
    )
    aside_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds for which a worker is set aside the first time. If it fails again then, before a plan has "
        "ended well there, it is set aside for twice as long as before, up to 32 times as long.",
    )
    decode_order: DecodeOrder = Field(
        default="urgent",
        description="Rule by which each C that is due gets an auxiliary: the most urgent, the first or the shortest "
        "goes first; or each waits at the auxiliary that was planned for it, first in, first out.",
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
    predict_every_s: float | None = Field(
        default=1.0,
        ge=0,
        description="Shortest time between two arrivals whose end is predicted, in seconds, for the record of how good "
        "predictions are, from which they learn; null: none. Quotes and `on_late` are answered in any case.",
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
        sharing: SharingRules | None = None,
    ) -> None:
        """Without a replanner the placement stays as it is. `sharing`: how the policy shares workers, by which the ends
        of requests are predicted; without it none is."""
        options = options or SchedulerOptions()
        self._pool = WorkerPool(workers, placement)
        self._ledger = Ledger(self._pool, options.max_retries)
        self._models = ModelStates(self._ledger, self._pool)
        self._stage_times = times
        self._times = ExpectedTimes(times, self._pool, options.slo_scale, replanner)
        self._dispatcher = dispatcher
        self._cores = SharedCores(self._pool, dispatcher)
        self._faults = FaultWatch(self._pool, options.max_worker_failures, options.aside_s)
        self._detours = Detours(self._pool, dispatcher, self._faults)
        self._replanner = replanner
        places = OtherPlaces(self._pool, times, self._faults.find_shunned)
        self._runner = AssignmentRunner(
            self._ledger,
            self._pool,
            self._times,
            places,
            EncodeQueue(self._pool, times, places, lambda plan_id: self._ledger.find_plan(plan_id) is not None),
            DecodeQueue(self._pool, times, places, options.decode_order),
            CheckpointSchedule(self._pool, options.checkpoint_s, options.checkpoint_steps),
        )
        self._predictor: Predictor | None = None
        if sharing is not None:
            self._predictor = Predictor(self._ledger, self._pool, times, sharing, options.predict_every_s)
        # Why requests of a kind can never run, None where they can; until the placement changes.
        self._why_not: dict[tuple[str, object, int], str | None] = {}

    @property
    def num_pending(self) -> int:
        """Requests that wait for a dispatch."""
        return len(self._ledger.pending)

    def summarize_load(self, now_s: float) -> CellSummary:
        """The load of its workers and what waits for them, for whoever chooses among schedulers."""
        return summarize_load(self._pool.list_views(), self._ledger.pending.values(), self._stage_times, now_s)

    def quote(self, spec: RequestSpec, now_s: float) -> Quote | ev.Reject | None:
        """The prediction for a request that would arrive now, or its refusal; None where nothing can be predicted. It
        changes nothing that is decided."""
        if (refusal := self._find_refusal(spec)) is not None:
            return refusal
        spec = self._times.shares.expect(spec)
        try:
            slo_s = self._times.slo_s(spec)
        except ProfileError as error:
            return ev.Reject(spec.request_id, "invalid_request", str(error))
        return self._predictor.quote(spec, slo_s, now_s) if self._predictor is not None else None

    def list_outlooks(self, now_s: float) -> Mapping[str, RequestOutlook]:
        """The prospects of the requests that have not ended, by request. It changes nothing."""
        return self._predictor.list_outlooks(now_s) if self._predictor is not None else {}

    def describe_cluster(self, now_s: float) -> ClusterState:
        """The state of its workers and requests, for whoever watches."""
        return describe_present(self._pool, self._ledger, self._faults, now_s)

    def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        """Take in one event. Reports of plans that are unknown (reported already) are ignored. Raises `PolicyError`
        when a tick's policy fails: what it holds has been decided before, the next tick may do better."""
        try:
            effects = self._take_in(event, now_s)
        except PolicyError as error:
            self._faults.note_ends(error.effects)
            raise
        if isinstance(event, ev.CheckpointSaved):
            return effects  # it moves nobody
        self._faults.note_ends(effects)
        effects += self._faults.review(now_s)
        due = self._runner.send_due(now_s)
        self._faults.note_ends(due)
        effects += due
        effects += self._models.take_due()
        return self._predictor.follow(effects, now_s) if self._predictor is not None else effects

    def _take_in(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        match event:
            case ev.RequestArrived():
                return self._accept(event.spec, now_s)
            case ev.RequestCancelled():
                return self._cancel(event.request_id)
            case ev.StageFinished():
                for worker_id, loras in event.loras:
                    self._pool.note_loras(worker_id, loras)
                return self._note_success(event) + self._runner.finish_plan(event, now_s)
            case ev.PlanComputed():
                self._ledger.free_workers(event.plan_id, now_s)
                return []
            case ev.CheckpointSaved():
                self._ledger.save(event)
                return []
            case ev.PlanStopped():
                return self._runner.end_stopped_plan(event, now_s)
            case ev.PlanFailed():
                self._note_failure(event)
                return self._runner.fail_plan(event, now_s)
            case ev.WorkerJoined():
                self._pool.join(event.worker, event.incarnation)
                return self._faults.note_join(event.worker.worker_id)
            case ev.WorkerLost():
                return self._ledger.lose_worker(event.worker_id, event.error)
            case ev.ReplicaLoaded():
                self._pool.note_load(event.worker_id, event.loaded, event.evicted)
                return []
            case ev.ModelAdded():
                return self._add_model(event)
            case ev.ModelDraining():
                self._models.drain(event.model)
                return []
            case ev.ModelRemoved():
                return self._remove_model(event)
            case ev.WarmUpBegun():
                self._pool.start(event.plan, event.expected_s, now_s)
                return []
            case ev.WarmUpEnded():
                self._pool.end(event.plan, now_s)
                return []
            case ev.Tick():
                return self._tick(now_s)

    # Requests come and go.

    def _accept(self, spec: RequestSpec, now_s: float) -> list[ev.Effect]:
        if spec.request_id in self._ledger.requests:
            return []  # the engine lets clients of the same id join; nothing new to decide
        if (refusal := self._find_refusal(spec)) is not None:
            return [refusal]
        try:
            slo_s = self._times.slo_s(spec)
        except ProfileError as error:
            return [ev.Reject(spec.request_id, "invalid_request", str(error))]
        effects: list[ev.Effect] = []
        spec = self._times.shares.expect(spec)
        if (predictor := self._predictor) is not None:
            quote = predictor.predict_arrival(spec, slo_s, now_s)
            if quote is not None and quote.is_late and spec.on_late == "refuse":
                return [ev.Reject(spec.request_id, "deadline_missed", quote.describe(), quote.seconds)]
            if quote is not None and quote.is_late and spec.on_late == "degrade":
                cheaper = self._times.shares.lower_quality(spec)
                less = find_less_work(spec, cheaper, lambda each: predictor.predict_arrival(each, slo_s, now_s))
                if less is not None:
                    effects.append(ev.Degrade.make(less[0], quote.describe()))
                    spec, quote = less
            predictor.note_arrival(spec, now_s, quote)
        request = Request(spec, arrival_s=now_s - spec.waited_s, slo_s=slo_s)
        self._ledger.requests[spec.request_id] = request
        self._ledger.wait(request)
        if self._replanner is not None:
            self._replanner.arrived(spec, now_s)
        return effects

    def _find_refusal(self, spec: RequestSpec) -> ev.Reject | None:
        """The refusal of a request that cannot be served, now or ever; None for others."""
        if (refusal := self._models.find_refusal(spec.request_id, spec.model)) is not None:
            return refusal
        key = (spec.model, spec.shape, spec.num_outputs)
        if key not in self._why_not:
            try:
                self._why_not[key] = self._dispatcher.can_ever_run(spec, self._pool.list_idle_views())
            except Exception as error:  # a policy that is a plug-in must not end the scheduler
                return ev.Reject(spec.request_id, TridentServeError.code, f"the dispatch policy failed: {error!r}")
        if (why_not := self._why_not[key]) is not None:
            return ev.Reject(spec.request_id, "invalid_request", why_not)
        return None

    def _cancel(self, request_id: str) -> list[ev.Effect]:
        request = self._ledger.requests.get(request_id)
        return self._ledger.cancel(request, "cancelled", "the request was cancelled") if request is not None else []

    # Plans end.

    def _note_success(self, event: ev.StageFinished) -> list[ev.Effect]:
        plan = self._ledger.find_plan(event.plan_id)
        return self._faults.note_success(plan) if plan is not None and event.spans else []

    def _note_failure(self, event: ev.PlanFailed) -> None:
        if (plan := self._ledger.find_plan(event.plan_id)) is not None:
            unfinished = [name for name in plan.request_ids if name in self._ledger.requests]
            self._faults.note_failure(unfinished, event.workers)

    # Models come and go.

    def _add_model(self, event: ev.ModelAdded) -> list[ev.Effect]:
        self._models.add(event.model)
        self._times.set_slo_scale(event.model, event.slo_scale)
        if self._replanner is not None:
            self._replanner.expect(event.model, event.expected, event.window_s)
        return self._place(event.placement)

    def _remove_model(self, event: ev.ModelRemoved) -> list[ev.Effect]:
        effects = self._models.remove(event.model)
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
        if self._replanner is not None and (plan := self._propose(self._replanner, now_s)) is not None:
            effects += self._place(plan)
        if not self._ledger.pending:
            return effects
        pending = list(self._ledger.pending.values())
        effects += self._detours.release_needed(pending)
        for part, shunned in self._detours.divide(pending):
            effects += self._dispatch(part, shunned, now_s, effects)
        return effects

    def _dispatch(
        self,
        pending: Sequence[PendingRequest],
        shunned: frozenset[WorkerId],
        now_s: float,
        decided: Sequence[ev.Effect],
    ) -> list[ev.Effect]:
        """Ask the policy about requests that are kept away from the workers `shunned`. `decided`: in this tick so
        far."""
        effects: list[ev.Effect] = []
        running = LazyViews(lambda: self._list_running(shunned, now_s))
        try:
            view = ClusterView(now_s, pending, running, self._cores.list_views(pending, shunned))
            decisions = self._dispatcher.decide(view)
        except Exception as error:
            raise PolicyError(f"the dispatcher failed: {error!r}", decided) from error
        effects += (effect for item in decisions.refusals for effect in self._refuse(item))
        effects += (effect for item in decisions.preemptions for effect in self._runner.preempt(item))
        for assignment in decisions.assignments:
            if (fault := self._find_fault(assignment)) is not None:
                message = f"the dispatcher assigned {', '.join(assignment.request_ids)}: {fault}"
                raise PolicyError(message, [*decided, *effects])
            effects += self._runner.start(assignment, now_s)
        return effects

    def _find_fault(self, assignment: Assignment) -> str | None:
        """The reason why requests cannot be assigned together; None where they can."""
        names, ledger = assignment.request_ids, self._ledger
        able = ledger.requests if assignment.takes_over else ledger.pending
        absent = [name for name in names if name not in able]
        if absent:
            return f"{', '.join(absent)} {'does' if len(absent) == 1 else 'do'} not wait"
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        return f"{', '.join(twice)} more than once" if twice else None

    def _propose(self, replanner: Replanner, now_s: float) -> PlacementPlan | None:
        try:
            return replanner.propose(self._pool.list_live(), self._pool.placement, now_s)
        except Exception as error:
            raise PolicyError(f"the replanner failed: {error!r}") from error

    def _list_running(self, shunned: frozenset[WorkerId], now_s: float) -> list[RunningRequest]:
        """The requests that run on workers which the policy sees."""
        hidden = shunned.union(self._faults.list_aside())
        runs = (run for run in self._ledger.runs.values() if not hidden.intersection(run.assignment.diffuse))
        return [run.view(request, now_s) for run in runs for request in run.requests]

    def _refuse(self, refusal: Refusal) -> list[ev.Effect]:
        request = self._ledger.requests.get(refusal.request_id)
        if request is None or request.run is not None:
            return []
        return [self._ledger.reject(request, "deadline_missed", refusal.reason)]
