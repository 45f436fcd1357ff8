"""Decides when the scheduler's next tick is due and what a tick gives whose policy fails: the same in both engines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from tridentserve.process.long_lived import defer_collections
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.scheduler import PolicyError

# The shortest time from the end of a tick to the next one.
TICK_S = 0.005
# While requests wait, the scheduler is asked this often even if nothing has happened: deadlines pass by themselves.
RETRY_S = 0.25
# Where nothing happens for long, because steps take long, it is asked less often: at this share of that time more.
_RETRY_SHARE, _LONGEST_RETRY_S = 1 / 4, 10.0


class SchedulerLike(Protocol):
    """The members of `tridentserve.scheduling.scheduler.Scheduler` that engines use."""

    @property
    def num_pending(self) -> int: ...

    def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]: ...


@dataclass(frozen=True, slots=True)
class TickOutcome:
    """The result of one tick."""

    effects: list[ev.Effect]
    """The effects that the engine carries out; after a tick that failed, those decided before the failure."""
    has_decided: bool
    """False where nothing was decided, not even that a request waits for a worker of its own: no client needs to
    know."""
    failure: PolicyError | None = None
    """The error of the policy, None where it did not fail."""
    is_repeated: bool = False
    """True when the tick before failed with the same message: whoever logs failures has logged this one."""


class TickPacer:
    """Decides when ticks are due, and makes them; no garbage is collected meanwhile. Pure: the time is an argument, in
    seconds of any one clock.

    A tick follows news at once, but no sooner than `tick_s` after the end of the last tick. While requests wait there
    is a tick every `retry_s`; after a long time without news, whenever that time has grown by a quarter. A policy that
    fails ends nothing: running plans continue, requests wait, and the next tick is due as after any other.
    """

    def __init__(self, tick_s: float = TICK_S, retry_s: float = RETRY_S) -> None:
        self._tick_s = tick_s
        self._retry_s = retry_s
        self._ended_s = self._news_s = -math.inf
        self._has_news = False
        self._last_failure = ""

    @property
    def has_news(self) -> bool:
        """True when something has happened since the last tick that may change what it decides."""
        return self._has_news

    def note_event(self, event: ev.Event) -> None:
        """The scheduler has been given an event that is not a tick."""
        self._has_news = self._has_news or ev.may_change_plans(event)

    def due_s(self, num_pending: int) -> float:
        """The time at which the next tick is due, which may have passed; infinity: none before something happens.

        `num_pending`: the number of requests that wait for a dispatch now."""
        if self._has_news:
            return self._ended_s + self._tick_s
        if not num_pending:
            return math.inf
        quiet_s = min(_LONGEST_RETRY_S, _RETRY_SHARE * (self._ended_s - self._news_s))
        return self._ended_s + max(self._retry_s, quiet_s)

    def tick(self, scheduler: SchedulerLike, now_s: float) -> TickOutcome:
        """Ask the scheduler. `note_end` must be called when the engine has its answer."""
        if self._has_news or self._news_s == -math.inf:
            self._has_news, self._news_s = False, now_s
        waiting = scheduler.num_pending
        with defer_collections():
            effects, failure = process_event(scheduler, ev.Tick(), now_s)
        message = str(failure) if failure is not None else ""
        is_repeated, self._last_failure = message == self._last_failure != "", message
        return TickOutcome(effects, bool(effects) or scheduler.num_pending != waiting, failure, is_repeated)

    def note_end(self, now_s: float) -> None:
        """The tick has ended at `now_s`."""
        self._ended_s = now_s


def process_event(
    scheduler: SchedulerLike, event: ev.Event, now_s: float
) -> tuple[list[ev.Effect], PolicyError | None]:
    """The effects of an event; where the policy fails on it, what had been decided before, and the error."""
    try:
        return scheduler.on(event, now_s), None
    except PolicyError as error:
        return error.effects, error
