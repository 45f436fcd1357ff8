"""A decision log to explain requests from, and the latest part of one, kept in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tridentserve.plans import PlacementPlan
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry

# Ticks come while requests wait, too: so many entries are kept at most for each request that is.
_ENTRIES_PER_REQUEST = 100


@dataclass(frozen=True, slots=True)
class Recording:
    """A decision log from the start of its service, or the latest part of one."""

    entries: Sequence[LogEntry]
    placement: PlacementPlan | None = None
    """The placement in force at the beginning; None: that of the service's start."""


class RecentDecisions:
    """The decisions about the latest requests. An entry costs no more than to be appended; the oldest are dropped in
    one go, when there are twice as many as wanted.

    A part of a log begins where no request was under way, if there is such a place. Else what it lacks is made up for:
    it has the arrivals of all requests that were under way, and the decisions whose plans were."""

    def __init__(self, num_requests: int) -> None:
        """At least so many requests are kept, if there were as many, and at most twice as many."""
        self._num_requests = num_requests
        self._entries: list[LogEntry] = []
        self._arrivals = 0
        self._placement: PlacementPlan | None = None

    def add(self, now_s: float, event: ev.Event, effects: list[ev.Effect]) -> None:
        """Keep one decision."""
        if not self._num_requests:
            return
        self._entries.append(LogEntry(now_s, event, effects))
        self._arrivals += isinstance(event, ev.RequestArrived)
        most = 2 * self._num_requests
        if self._arrivals > most or len(self._entries) > most * _ENTRIES_PER_REQUEST:
            self._shorten()

    def copy(self) -> Recording:
        """All that is kept now."""
        return Recording(tuple(self._entries), self._placement)

    def _shorten(self) -> None:
        cut = self._choose_cut()
        begun = _Begun()
        for entry in self._entries[:cut]:
            begun.take_in(entry)
        self._placement = begun.placement or self._placement
        self._entries = [entry for entry in self._entries[:cut] if begun.is_needed(entry)] + self._entries[cut:]
        self._arrivals = sum(isinstance(entry.event, ev.RequestArrived) for entry in self._entries)

    def _choose_cut(self) -> int:
        """The number of the oldest entries that are dropped: up to the last moment without requests before the latest
        `num_requests`, or the latest of which there are not too many entries; else up to these."""
        arrivals = [number for number, entry in enumerate(self._entries) if isinstance(entry.event, ev.RequestArrived)]
        latest = arrivals[-self._num_requests] if len(arrivals) >= self._num_requests else 0
        latest = max(latest, len(self._entries) - self._num_requests * _ENTRIES_PER_REQUEST)
        open_requests: set[str] = set()
        quiet = 0
        for number, entry in enumerate(self._entries[: latest + 1]):
            if not open_requests and isinstance(entry.event, ev.RequestArrived):
                quiet = number
            _note_requests(entry, open_requests)
        return quiet if quiet >= latest / 2 else latest


class _Begun:
    """The requests, plans and workers that have begun and not ended, and what is in force."""

    def __init__(self) -> None:
        self.requests: set[str] = set()
        self.plans: set[int] = set()
        self.workers: set[str] = set()
        self.models: set[str] = set()
        self.placement: PlacementPlan | None = None

    def take_in(self, entry: LogEntry) -> None:
        _note_requests(entry, self.requests)
        match entry.event:
            case ev.WorkerJoined():
                self.workers.add(entry.event.worker.worker_id)
            case ev.WorkerLost():
                self.workers.discard(entry.event.worker_id)
            case ev.ModelAdded():
                self.models.add(entry.event.model)
            case ev.ModelRemoved():
                self.models.discard(entry.event.model)
            case ev.StageFinished() | ev.PlanStopped() | ev.PlanFailed():
                self.plans.discard(entry.event.plan_id)
            case _:
                pass
        for effect in entry.effects:
            if isinstance(effect, ev.RunPlan):
                self.plans.add(effect.plan.plan_id)
            elif isinstance(effect, ev.Place):
                self.placement = effect.plan

    def is_needed(self, entry: LogEntry) -> bool:
        """True of an entry with the beginning of something that has not ended."""
        match entry.event:
            case ev.RequestArrived():
                begins = entry.event.spec.request_id in self.requests
            case ev.WorkerJoined():
                begins = entry.event.worker.worker_id in self.workers
            case ev.ModelAdded():
                begins = entry.event.model in self.models
            case _:
                begins = False
        plans = (effect.plan.plan_id for effect in entry.effects if isinstance(effect, ev.RunPlan))
        return begins or not self.plans.isdisjoint(plans)


def _note_requests(entry: LogEntry, open_requests: set[str]) -> None:
    if isinstance(entry.event, ev.RequestArrived):
        open_requests.add(entry.event.spec.request_id)
    for effect in entry.effects:
        if isinstance(effect, ev.Finish | ev.Reject):
            open_requests.discard(effect.request_id)
