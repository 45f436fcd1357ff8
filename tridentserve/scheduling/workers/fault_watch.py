"""Workers on which plans fail: which of them a request is kept away from, and which are set aside for a while.

A worker whose device is broken fails at once whatever it is given. It is always idle then, and without this it would
be given every request, one after another. But a plan may also fail because of a request in it, and that one fails
wherever it is tried. So failures count against a worker only as long as their requests have failed nowhere else, or
have ended well there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tridentserve.plans import DispatchPlan, WorkerId
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.workers.worker_pool import WorkerPool

# A worker is set aside for twice as long each time, up to so many times.
_MOST_DOUBLINGS = 5
# The failures of one worker that are kept: more than anybody counts.
_MOST_KEPT = 100


@dataclass(slots=True)
class _Streak:
    """The failures of a worker since a plan has last ended well on it."""

    failures: list[set[str]] = field(default_factory=list)
    """The requests of each plan that failed which have not ended well elsewhere."""
    others_ran: bool = False
    """A plan has ended well on another worker since the first of them."""
    times_aside: int = 0
    until_s: float | None = None
    """The time until which the worker is set aside; None where it is not."""

    def add(self, request_ids: set[str]) -> None:
        """A plan of these requests has failed. One request alone makes no streak, however often it fails."""
        self.failures = [names for names in self.failures[-_MOST_KEPT:] if not names & request_ids]
        self.failures.append(request_ids)


class FaultWatch:
    """Keeps the failures of plans by worker and by request. Pure: the time is an argument."""

    def __init__(self, pool: WorkerPool, max_failures: int | None, aside_s: float) -> None:
        """See `SchedulerOptions.max_worker_failures` and `aside_s`."""
        self._pool = pool
        self._enough = math.inf if max_failures is None else max_failures
        self._aside_s = aside_s
        self._streaks: dict[WorkerId, _Streak] = {}
        # The workers on which requests that have not ended have failed, and whether they were alone in a plan then.
        self._failed_on: dict[str, dict[WorkerId, bool]] = {}

    @property
    def knows_failures(self) -> bool:
        """True while a request that has failed has not ended, or a worker has failed its last plan."""
        return bool(self._failed_on or self._streaks)

    def find_shunned(self, request_ids: Iterable[str], alone: bool = False) -> frozenset[WorkerId]:
        """The workers on which any of these requests has failed. `alone`: not only with others, one of which may have
        been at fault."""
        if not self._failed_on:
            return frozenset()
        found = (item for name in request_ids for item in self._failed_on.get(name, {}).items())
        return frozenset(worker_id for worker_id, was_alone in found if was_alone or not alone)

    def note_failure(self, request_ids: Iterable[str], workers: Sequence[WorkerId]) -> None:
        """A plan has failed because of these workers, or of one of these requests."""
        names = set(request_ids)
        if not names:
            return
        for worker_id in workers:
            for name in names:
                known = self._failed_on.setdefault(name, {})
                known[worker_id] = known.get(worker_id, False) or len(names) == 1
            if self._enough < math.inf:
                self._streaks.setdefault(worker_id, _Streak()).add(set(names))

    def note_success(self, plan: DispatchPlan) -> list[ev.Effect]:
        """A plan has ended well: its workers are given plans again, if they were set aside."""
        effects: list[ev.Effect] = []
        for worker_id in plan.workers if self._streaks else ():
            if (streak := self._streaks.pop(worker_id, None)) is not None and streak.until_s is not None:
                effects.append(self._reinstate(worker_id, "a plan has ended well there"))
        for streak in self._streaks.values():
            streak.others_ran = True
        return effects

    def note_join(self, worker_id: WorkerId) -> list[ev.Effect]:
        """A worker has a new process. Another failure is enough to set it aside again."""
        streak = self._streaks.get(worker_id)
        return [self._release(worker_id, streak, "it has started again")] if streak and streak.until_s else []

    def note_ends(self, effects: Iterable[ev.Effect]) -> None:
        """Take in which requests have ended."""
        for effect in effects if self.knows_failures else ():
            if isinstance(effect, ev.Finish | ev.Reject):
                self._end(effect.request_id, is_well=isinstance(effect, ev.Finish))

    def review(self, now_s: float) -> list[ev.Effect]:
        """Set workers aside, or give them plans again. To be asked after each event."""
        effects: list[ev.Effect] = []
        for worker_id, streak in self._streaks.items():
            count = self._count(worker_id, streak)
            if streak.until_s is not None:
                if now_s >= streak.until_s:
                    effects.append(self._release(worker_id, streak, "it is tried again"))
                elif count < self._enough:
                    streak.until_s = None
                    streak.times_aside -= 1
                    effects.append(self._reinstate(worker_id, "its requests have failed elsewhere too"))
            elif count >= self._enough and streak.others_ran and self._pool.is_replaceable(worker_id):
                effects.append(self._set_aside(worker_id, streak, count, now_s))
        return effects

    def release_all(self, why: str) -> list[ev.Effect]:
        """Give all workers plans again: nothing else can run what waits."""
        effects: list[ev.Effect] = []
        for worker_id, streak in self._streaks.items():
            if streak.until_s is not None:
                effects.append(self._release(worker_id, streak, why))
                streak.failures.clear()
        return effects

    def list_aside(self) -> Collection[WorkerId]:
        """The workers that are set aside."""
        return [worker_id for worker_id, streak in self._streaks.items() if streak.until_s is not None]

    def find_until_s(self, worker_id: WorkerId) -> float | None:
        """The time until which a worker is set aside; None where it is not."""
        streak = self._streaks.get(worker_id)
        return streak.until_s if streak is not None else None

    def _end(self, request_id: str, is_well: bool) -> None:
        is_at_fault = not is_well and len(self._failed_on.get(request_id, ())) > 1
        self._failed_on.pop(request_id, None)
        for streak in self._streaks.values():
            if is_at_fault:
                streak.failures = [names for names in streak.failures if request_id not in names]
            elif is_well:
                for names in streak.failures:
                    names.discard(request_id)

    def _count(self, worker_id: WorkerId, streak: _Streak) -> int:
        """The failed plans of which all requests have failed nowhere else, or have ended well elsewhere."""
        own = {worker_id: True}
        return sum(
            all(self._failed_on.get(name, own).keys() == own.keys() for name in names) for names in streak.failures
        )

    def _set_aside(self, worker_id: WorkerId, streak: _Streak, count: int, now_s: float) -> ev.SetAside:
        streak.until_s = now_s + self._aside_s * 2 ** min(streak.times_aside, _MOST_DOUBLINGS)
        streak.times_aside += 1
        self._pool.set_aside(worker_id, True)
        return ev.SetAside(worker_id, f"{count} plans in a row failed there, and others ran elsewhere", streak.until_s)

    def _release(self, worker_id: WorkerId, streak: _Streak, why: str) -> ev.SetAside:
        """One more failure is enough to set it aside again."""
        streak.until_s = None
        while len(streak.failures) >= self._enough:
            del streak.failures[0]
        return self._reinstate(worker_id, why)

    def _reinstate(self, worker_id: WorkerId, why: str) -> ev.SetAside:
        self._pool.set_aside(worker_id, False)
        return ev.SetAside(worker_id, why, None)
