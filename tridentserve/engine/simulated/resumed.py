"""A decision log that is followed up to a moment and simulated from there, as it was or with something changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated.agenda import Agenda
from tridentserve.engine.simulated.cell import SimulatedCell
from tridentserve.engine.simulated.options import SimulationOptions
from tridentserve.engine.simulated.recorder import Recorder
from tridentserve.engine.simulated.workers.actual_times import TimeFactors
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry
from tridentserve.scheduling.tick_pacer import SchedulerLike

# Requests are looked at this often, in seconds of the simulation, to see whether the one in question has ended.
_LOOK_S = 0.5

_PlanEndEvent = ev.StageFinished | ev.PlanStopped | ev.PlanFailed
# Events that come from outside of the scheduler and its workers.
_FROM_OUTSIDE = (
    ev.RequestArrived,
    ev.RequestCancelled,
    ev.WorkerJoined,
    ev.WorkerLost,
    ev.ModelAdded,
    ev.ModelDraining,
    ev.ModelRemoved,
    ev.WarmUpBegun,
    ev.WarmUpEnded,
)


@dataclass(frozen=True, slots=True)
class ResumedEnd:
    """The end of one request in a simulation."""

    end_s: float | None
    """None where it did not end."""
    outcome: str
    """As in `RequestResult`."""
    slo_s: float | None
    """Seconds from arrival to the deadline; None where it did not finish."""
    took_over_s: float
    """The time up to which the log was followed."""


class ResumedSimulation:
    """Follows a log for as long as a new scheduler decides as it says, and no longer than to a given moment. The
    scheduler is then in the state that it was in, and so are queues, reservations, weights and plans under way."""

    def __init__(
        self,
        scheduler: SchedulerLike,
        workers: Sequence[WorkerSpec],
        placement: PlacementPlan,
        times: StageTimes,
        options: SimulationOptions,
        factors: TimeFactors,
    ) -> None:
        """See `SimulatedEngine`, and for `factors` `ActualTimes`: the seconds of requests by the log."""
        self._agenda = Agenda()
        self._recorder = Recorder(options.keep_plans, None)
        self._cell = SimulatedCell(scheduler, workers, placement, times, options, self._agenda, self._recorder, factors)
        # The ids that plans of the log have here: a scheduler that begins in the middle of a log counts from 1.
        self._ids: dict[int, int] = {}
        self._under_way: dict[int, None] = {}
        self._took_over_s = 0.0

    def run(
        self,
        entries: Sequence[LogEntry],
        request_id: str,
        until_s: float,
        *,
        without: frozenset[str] = frozenset(),
        joins: WorkerSpec | None = None,
    ) -> ResumedEnd:
        """The end of a request where the log is followed up to `until_s`; from there on requests `without` do not come,
        and the worker `joins` does. To be called once."""
        self._cell.prepare()
        followed = self._follow(entries, until_s)
        self._took_over_s = self._agenda.now_s
        for entry in entries[followed:]:
            if isinstance(entry.event, _FROM_OUTSIDE) and not _is_left_out(entry.event, without):
                self._agenda.call_at(entry.now_s, self._happen, entry.event)
        self._take_over(entries[followed:])
        if joins is not None:
            self._cell.change(ev.WorkerJoined(joins))
        return self._run_to_end(request_id)

    def _follow(self, entries: Sequence[LogEntry], until_s: float) -> int:
        """Returns the number of entries that were followed."""
        for number, entry in enumerate(entries):
            if entry.now_s >= until_s:
                return number
            self._go_to(entry.now_s)
            event = self._translate(entry.event)
            if event is None:
                continue
            if isinstance(event, ev.RequestArrived):
                self._recorder.record_arrival(event.spec, entry.now_s - event.spec.waited_s)
            if isinstance(event, _PlanEndEvent):
                self._under_way.pop(event.plan_id, None)
            effects = self._cell.follow(event, entry.now_s)
            sent = [effect.plan.plan_id for effect in effects if isinstance(effect, ev.RunPlan)]
            self._under_way.update(dict.fromkeys(sent))
            if [_describe(each) for each in effects] != [_describe(each) for each in entry.effects]:
                return number + 1
            logged = [effect.plan.plan_id for effect in entry.effects if isinstance(effect, ev.RunPlan)]
            self._ids.update(zip(logged, sent, strict=True))
        return len(entries)

    def _go_to(self, now_s: float) -> None:
        self._agenda.run(now_s)
        self._agenda.now_s = max(self._agenda.now_s, now_s)

    def _translate(self, event: ev.Event) -> ev.Event | None:
        """The event with the id that its plan has here; None for one about a plan that began before the log."""
        if not isinstance(event, _PlanEndEvent | ev.PlanComputed | ev.CheckpointSaved):
            return event
        plan_id = self._ids.get(event.plan_id)
        return None if plan_id is None else replace(event, plan_id=plan_id)

    def _take_over(self, rest: Sequence[LogEntry]) -> None:
        reports: dict[int, ev.StageFinished] = {}
        times: dict[int, float] = {}
        for entry in rest:
            event = self._translate(entry.event)
            if isinstance(event, ev.StageFinished) and event.plan_id in self._under_way:
                reports[event.plan_id], times[event.plan_id] = event, entry.now_s
        self._cell.take_over({plan_id: reports.get(plan_id) for plan_id in self._under_way}, times)

    def _happen(self, event: ev.Event) -> None:
        if isinstance(event, ev.RequestArrived):
            self._arrive(event.spec)
        else:
            self._cell.change(event)

    def _arrive(self, spec: RequestSpec) -> None:
        self._recorder.record_arrival(spec, self._agenda.now_s - spec.waited_s)
        self._cell.arrive(spec)

    def _run_to_end(self, request_id: str) -> ResumedEnd:
        agenda = self._agenda
        while not self._has_ended(request_id) and not agenda.is_empty:
            agenda.run(agenda.now_s + _LOOK_S)
        result = self._recorder.make_result(1)
        found = next((each for each in result.requests if each.spec.request_id == request_id), None)
        if found is None:
            return ResumedEnd(None, "unfinished", None, self._took_over_s)
        return ResumedEnd(found.end_s, found.outcome, found.slo_s, self._took_over_s)

    def _has_ended(self, request_id: str) -> bool:
        return self._recorder.knows(request_id) and self._recorder.has_ended(request_id)


def _is_left_out(event: ev.Event, without: frozenset[str]) -> bool:
    match event:
        case ev.RequestArrived():
            return event.spec.request_id in without
        case ev.RequestCancelled():
            return event.request_id in without
        case _:
            return False


def _describe(effect: ev.Effect) -> tuple[Any, ...]:
    """All of an effect that matters to others, without the ids of plans, the reasons and what was predicted."""
    match effect:
        case ev.RunPlan():
            plan = effect.plan
            members = tuple((member.request_id, member.steps) for member in plan.members)
            return ("run", plan.model, plan.stages, plan.workers, members, plan.decode_degree)
        case ev.Place():
            return ("place", tuple(sorted((name, tuple(sorted(held))) for name, held in effect.plan.replicas.items())))
        case ev.Finish() | ev.Requeue() | ev.Reject():
            return (effect.kind, effect.request_id)
        case _:
            return (effect.kind,)
