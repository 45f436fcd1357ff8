"""The lives of requests and the bookings of workers, as a decision log tells them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from tridentserve.cluster import WorkerSpec
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica, StageSpan, WorkerId
from tridentserve.protocols import LoadSource
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry
from tridentserve.stages import Stage

PlanEnd = Literal["under way", "finished", "yielded", "stopped", "failed"]
BookingKind = Literal["runs", "is reserved"]


@dataclass(slots=True)
class LoggedPlan:
    """A plan from when it was sent to when its end was reported."""

    plan: DispatchPlan
    sent_s: float
    reason: str
    """The scheduler's, in its own words."""
    spans: tuple[StageSpan, ...] = ()
    """Its stages as they ran; none where it failed or was stopped."""
    reported_s: float | None = None
    """The time at which the scheduler knew of its end."""
    outcome: PlanEnd = "under way"
    freed_s: float | None = None
    """The time at which its workers were free, where that was before its end was known."""

    @property
    def begins_with_content(self) -> bool:
        """It takes nothing from a plan before it."""
        return all(member.input_id is None for member in self.plan.members)


@dataclass(slots=True)
class Life:
    """One request from its arrival to its end, or to that of the log."""

    spec: RequestSpec
    arrival_s: float
    slo_s: float | None = None
    """Seconds from arrival to the deadline; None where the log does not say, as the request has not finished."""
    plans: list[LoggedPlan] = field(default_factory=list)
    """In the order in which they were sent."""
    requeues: list[tuple[float, str]] = field(default_factory=list)
    """The times at which it had to wait again after a failure, with the reasons."""
    end_s: float | None = None
    outcome: str = "unfinished"
    """ "finished", "unfinished", or the code of its error."""
    reason: str = ""
    """The scheduler's, for its end."""

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def latency_s(self) -> float | None:
        """Seconds from arrival to the end, whatever it was."""
        return None if self.end_s is None else self.end_s - self.arrival_s

    @property
    def late_s(self) -> float | None:
        """Seconds from the deadline to the end, below 0 when it was on time; None where either is not known."""
        return None if self.latency_s is None or self.slo_s is None else self.latency_s - self.slo_s

    @property
    def is_late(self) -> bool:
        """True of one that finished after its deadline, or was given up because of it."""
        if self.outcome == "finished":
            return self.late_s is not None and self.late_s > 0
        return self.outcome == "deadline_missed"

    def find_diffuse_after(self, plan: LoggedPlan) -> LoggedPlan:
        """The plan with D that this plan, or one after it, belongs to; the plan itself where none follows."""
        later = self.plans[self.plans.index(plan) :]
        return next((each for each in later if Stage.DIFFUSE in each.plan.stages), plan)


@dataclass(frozen=True, slots=True)
class Booking:
    """A time in which a worker had a plan, or was kept for one."""

    start_s: float
    end_s: float
    request_ids: tuple[str, ...]
    kind: BookingKind = "runs"


@dataclass(frozen=True, slots=True)
class LoggedLoad:
    """A time in which a worker loaded weights."""

    worker_id: WorkerId
    replica: Replica
    source: LoadSource
    start_s: float
    end_s: float


class Chronicle:
    """All that a sequence of log entries says of requests, plans, workers and placements."""

    def __init__(self, entries: Iterable[LogEntry], placement: PlacementPlan | None = None) -> None:
        """`placement`: the one in force at the beginning, which the log does not hold; None: not known."""
        self.lives: dict[str, Life] = {}
        """By request id; of an id that came twice the latest."""
        self.plans: dict[int, LoggedPlan] = {}
        self.loads: list[LoggedLoad] = []
        self.told_until_s = 0.0
        """The time of the last entry."""
        self._placements: list[tuple[float, PlacementPlan]] = [] if placement is None else [(float("-inf"), placement)]
        self._specs: dict[WorkerId, WorkerSpec] = {}
        self._absences: defaultdict[WorkerId, list[tuple[float, float]]] = defaultdict(list)
        for entry in entries:
            self._take_in(entry)
        self._bookings = self._book()

    # Questions.

    def list_late(self) -> list[Life]:
        """The requests that were late, in the order in which they ended."""
        return sorted(
            (life for life in self.lives.values() if life.is_late),
            key=lambda life: life.arrival_s + (life.latency_s or 0.0),
        )

    def list_bookings(self, worker_id: WorkerId) -> list[Booking]:
        return self._bookings.get(worker_id, [])

    def list_able(self, model: str, at_s: float) -> set[WorkerId]:
        """The workers that could denoise for a model: by the placement in force, else those that did in the log."""
        return {worker_id for worker_id, models in self._list_denoisers(at_s).items() if model in models}

    def list_sharing(self, worker_id: WorkerId, at_s: float) -> tuple[set[WorkerId], int | None]:
        """The workers that denoise on the cores of a worker's node, and how many of them may at once; None: all."""
        spec = self._specs.get(worker_id)
        if spec is None or spec.max_denoising is None:
            return set(), None
        denoisers = self._list_denoisers(at_s)
        return {name for name in denoisers if self._specs[name].node_id == spec.node_id}, spec.max_denoising

    def _list_denoisers(self, at_s: float) -> dict[WorkerId, set[str]]:
        """The live workers that could denoise, with the models for which."""
        plan = next((plan for since_s, plan in reversed(self._placements) if since_s <= at_s), None)
        found: dict[WorkerId, set[str]] = {}
        if plan is not None:
            for worker_id, held in plan.replicas.items():
                found[worker_id] = {replica.model for replica in held if replica.stage is Stage.DIFFUSE}
        else:
            for logged in self.plans.values():
                for worker_id in logged.plan.workers if Stage.DIFFUSE in logged.plan.stages else ():
                    found.setdefault(worker_id, set()).add(logged.plan.model)
        return {name: models for name, models in found.items() if models and self._is_alive(name, at_s)}

    def _is_alive(self, worker_id: WorkerId, at_s: float) -> bool:
        absences = self._absences.get(worker_id, ())
        return worker_id in self._specs and not any(start_s <= at_s < end_s for start_s, end_s in absences)

    # The entries.

    def _take_in(self, entry: LogEntry) -> None:
        now_s, event = entry.now_s, entry.event
        self.told_until_s = max(self.told_until_s, now_s)
        match event:
            case ev.RequestArrived():
                spec = event.spec
                known = self.lives.get(spec.request_id)
                if known is None or known.end_s is not None:
                    self.lives[spec.request_id] = Life(spec, now_s - spec.waited_s, spec.slo_s)
            case ev.StageFinished():
                self._end_plan(event.plan_id, now_s, "finished" if event.num_steps is None else "yielded", event.spans)
            case ev.PlanComputed():
                if (logged := self.plans.get(event.plan_id)) is not None:
                    logged.freed_s = now_s
            case ev.PlanStopped():
                self._end_plan(event.plan_id, now_s, "stopped")
            case ev.PlanFailed():
                self._end_plan(event.plan_id, now_s, "failed")
            case ev.ReplicaLoaded():
                load = LoggedLoad(event.worker_id, event.loaded, event.source, now_s - event.seconds, now_s)
                self.loads.append(load)
            case ev.WorkerLost():
                self._absences[event.worker_id].append((now_s, float("inf")))
            case ev.WorkerJoined():
                self._specs[event.worker.worker_id] = event.worker
                if absences := self._absences.get(event.worker.worker_id):
                    absences[-1] = (absences[-1][0], now_s)
            case ev.ModelAdded() | ev.ModelRemoved() | ev.RequestCancelled() | ev.CheckpointSaved():
                pass
            case ev.ModelDraining() | ev.WarmUpBegun() | ev.WarmUpEnded() | ev.Tick():
                pass
        for effect in entry.effects:
            self._apply(effect, now_s)

    def _end_plan(self, plan_id: int, now_s: float, outcome: PlanEnd, spans: tuple[StageSpan, ...] = ()) -> None:
        plan = self.plans.get(plan_id)
        if plan is not None and plan.reported_s is None:
            plan.reported_s, plan.outcome, plan.spans = now_s, outcome, spans
            if plan.plan.takes_over is not None and outcome != "failed" and not spans:
                # It found nothing to go on with.
                for request_id in plan.plan.request_ids:
                    if (life := self.lives.get(request_id)) is not None and plan in life.plans:
                        life.plans.remove(plan)

    def _apply(self, effect: ev.Effect, now_s: float) -> None:
        match effect:
            case ev.RunPlan():
                logged = self.plans[effect.plan.plan_id] = LoggedPlan(effect.plan, now_s, effect.reason)
                for request_id in effect.plan.request_ids:
                    if (life := self.lives.get(request_id)) is not None:
                        life.plans.append(logged)
            case ev.Place():
                self._placements.append((now_s, effect.plan))
            case ev.Requeue():
                if (life := self.lives.get(effect.request_id)) is not None:
                    life.requeues.append((now_s, effect.reason))
            case ev.Finish() | ev.Reject():
                if (life := self.lives.get(effect.request_id)) is not None and life.end_s is None:
                    life.end_s, life.reason = now_s, effect.reason
                    # It ended with the plan that another one takes over.
                    life.plans = [each for each in life.plans if each.plan.takes_over is None or each.reported_s]
                    life.outcome = "finished" if isinstance(effect, ev.Finish) else effect.code
                    life.slo_s = effect.slo_s if isinstance(effect, ev.Finish) else life.slo_s
            case ev.Degrade():
                if (life := self.lives.get(effect.request_id)) is not None:
                    life.spec = effect.apply(life.spec)
            case ev.Abort() | ev.Yield() | ev.SetAside() | ev.Drained() | ev.Unload():
                pass

    # Bookings.

    def _book(self) -> dict[WorkerId, list[Booking]]:
        """The bookings of each worker. A plan that waits behind another one has the worker from the end of that one
        on."""
        found: defaultdict[WorkerId, list[Booking]] = defaultdict(list)
        free_s: defaultdict[WorkerId, float] = defaultdict(float)
        for logged in self.plans.values():
            end_s = next((end for end in (logged.freed_s, logged.reported_s) if end is not None), self.told_until_s)
            for worker_id in logged.plan.workers:
                start_s = max(logged.sent_s, free_s[worker_id])
                free_s[worker_id] = max(free_s[worker_id], end_s)
                if start_s < end_s:
                    names = tuple(name for name in logged.plan.request_ids if self._is_open(name, start_s))
                    found[worker_id].append(Booking(start_s, end_s, names))
        for worker_id, booking in self._list_reservations():
            found[worker_id].append(booking)
        return {worker_id: sorted(bookings, key=lambda each: each.start_s) for worker_id, bookings in found.items()}

    def _is_open(self, request_id: str, at_s: float) -> bool:
        """True for a request that has not ended by then. One that a plan takes over may have."""
        life = self.lives.get(request_id)
        return life is not None and (life.end_s is None or life.end_s > at_s)

    def _list_reservations(self) -> Iterator[tuple[WorkerId, Booking]]:
        """The workers of D are reserved while E runs elsewhere."""
        for life in self.lives.values():
            for before, after in pairwise(life.plans):
                if before.plan.stages == (Stage.ENCODE,) and Stage.DIFFUSE in after.plan.stages:
                    booking = Booking(before.sent_s, after.sent_s, (life.request_id,), "is reserved")
                    yield from ((worker_id, booking) for worker_id in after.plan.workers)
