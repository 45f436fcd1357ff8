"""A decision log to explain requests from, and the latest part of one, kept in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry

# A log is followed from its beginning where no more entries than these would be left out otherwise.
_WORTH_LEAVING_OUT = 2000
# Ticks come while requests wait, too: so many entries are kept at most for each request that is.
_ENTRIES_PER_REQUEST = 100


@dataclass(frozen=True, slots=True)
class Recording:
    """A decision log from the start of its service, or the latest part of one."""

    entries: Sequence[LogEntry]
    placement: PlacementPlan | None = None
    """The placement in force at the beginning; None: that of the service's start."""

    def begin_before(self, from_s: float) -> tuple[Recording, Sequence[LogEntry]]:
        """The part of a long log from the last moment without requests before `from_s`, and the entries before it; of
        one that never was without requests, or is not long, all of it."""
        open_requests: set[str] = set()
        cut = 0
        for number, entry in enumerate(self.entries):
            if not open_requests and isinstance(entry.event, ev.RequestArrived):
                cut = number
            if entry.now_s >= from_s:
                break
            _note_requests(entry, open_requests)
        if cut <= _WORTH_LEAVING_OUT:
            return self, ()
        before = self.entries[:cut]
        begun = _Begun(before)
        entries = [*begun.list_needed(), *self.entries[cut:]]
        return Recording(entries, begun.placement or self.placement), before


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
        begun = _Begun(self._entries[:cut])
        self._placement = begun.placement or self._placement
        self._entries = begun.list_needed() + self._entries[cut:]
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
    """The requests, plans and workers that have begun and not ended in some entries, and the placement after them."""

    def __init__(self, entries: Sequence[LogEntry]) -> None:
        self._entries = entries
        self._requests: set[str] = set()
        self._plans: set[int] = set()
        self._workers: set[WorkerId] = set()
        self._models: set[str] = set()
        self._warm_ups: set[int] = set()
        # The latest load of each replica that has not left its worker since.
        self._loads: dict[tuple[WorkerId, Replica], LogEntry] = {}
        self.placement: PlacementPlan | None = None
        for entry in entries:
            self._take_in(entry)

    def list_needed(self) -> list[LogEntry]:
        """The entries with the beginning of something that has not ended."""
        loads = {id(entry) for entry in self._loads.values()}
        return [entry for entry in self._entries if id(entry) in loads or self._is_needed(entry)]

    def _take_in(self, entry: LogEntry) -> None:
        _note_requests(entry, self._requests)
        match entry.event:
            case ev.WorkerJoined():
                self._workers.add(entry.event.worker.worker_id)
            case ev.WorkerLost():
                self._lose(entry.event.worker_id)
            case ev.ReplicaLoaded():
                for replica in entry.event.evicted:
                    self._loads.pop((entry.event.worker_id, replica), None)
                self._loads[entry.event.worker_id, entry.event.loaded] = entry
            case ev.ModelAdded():
                self._models.add(entry.event.model)
            case ev.ModelRemoved():
                self._models.discard(entry.event.model)
            case ev.StageFinished() | ev.PlanStopped() | ev.PlanFailed():
                self._plans.discard(entry.event.plan_id)
            case ev.WarmUpBegun():
                self._warm_ups.add(entry.event.plan.plan_id)
            case ev.WarmUpEnded():
                self._warm_ups.discard(entry.event.plan.plan_id)
            case _:
                pass
        for effect in entry.effects:
            if isinstance(effect, ev.RunPlan):
                self._plans.add(effect.plan.plan_id)
            elif isinstance(effect, ev.Place):
                self.placement = effect.plan

    def _lose(self, worker_id: WorkerId) -> None:
        self._workers.discard(worker_id)
        for key in [key for key in self._loads if key[0] == worker_id]:
            del self._loads[key]

    def _is_needed(self, entry: LogEntry) -> bool:
        match entry.event:
            case ev.RequestArrived():
                begins = entry.event.spec.request_id in self._requests
            case ev.WorkerJoined():
                begins = entry.event.worker.worker_id in self._workers
            case ev.ModelAdded():
                begins = entry.event.model in self._models
            case ev.WarmUpBegun():
                begins = entry.event.plan.plan_id in self._warm_ups
            case _:
                begins = False
        plans = (effect.plan.plan_id for effect in entry.effects if isinstance(effect, ev.RunPlan))
        return begins or not self._plans.isdisjoint(plans)


def _note_requests(entry: LogEntry, open_requests: set[str]) -> None:
    if isinstance(entry.event, ev.RequestArrived):
        open_requests.add(entry.event.spec.request_id)
    for effect in entry.effects:
        if isinstance(effect, ev.Finish | ev.Reject):
            open_requests.discard(effect.request_id)
