"""Drives the scheduler on simulated time, as the live engine's thread does on real time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Protocol

from tridentserve import events as ev
from tridentserve.decisions import Decision, encode_decision
from tridentserve.engine.simulated.agenda import Agenda
from tridentserve.engine.simulated.options import SimulationOptions
from tridentserve.engine.simulated.result import Counts


class SchedulerLike(Protocol):
    """What a simulation needs of `tridentserve.scheduler.Scheduler`."""

    @property
    def num_pending(self) -> int: ...

    def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]: ...


class SimulatedCore:
    """Owns the scheduler. `listener` carries out the effects of an event.

    While a tick is being solved the workers go on, and what they report waits: the effects of the tick come first.
    """

    def __init__(
        self,
        scheduler: SchedulerLike,
        agenda: Agenda,
        listener: Callable[[ev.Event, list[ev.Effect]], None],
        options: SimulationOptions,
        counts: Counts,
        log: IO[str] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._agenda = agenda
        self._listener = listener
        self._options = options
        self._counts = counts
        self._log = log
        self._inbox: deque[tuple[float, ev.Event]] = deque()
        self._is_busy = False
        self._has_news = False
        # The next tick may come at this time; one is due at `_due_s`, entered under the number `_due`.
        self._next_tick_s = 0.0
        self._due_s = math.inf
        self._due = 0
        self._last_change_s = 0.0

    def post(self, event: ev.Event) -> None:
        """Something has happened now. May be called from the listener."""
        self._inbox.append((self._agenda.now_s, event))
        if not self._is_busy:
            self._is_busy = True
            self._handle_inbox()

    def _handle_inbox(self) -> None:
        """Take in what has come, and go on from there."""
        while self._inbox:
            posted_s, event = self._inbox.popleft()
            self._has_news |= ev.may_change_plans(event)
            # The time of an event is when it was posted, as in the live engine: a solve in between is waiting.
            self._take(posted_s, event, self._scheduler.on(event, posted_s))
        self._is_busy = False
        now_s = self._agenda.now_s
        if self._has_news:
            self._enter_tick(max(now_s, self._next_tick_s))
        elif self._scheduler.num_pending and not self._is_stuck():
            self._enter_tick(now_s + self._options.retry_s)

    def _is_stuck(self) -> bool:
        """Nothing has happened for long, and nothing will."""
        return not len(self._agenda) and self._agenda.now_s - self._last_change_s > self._options.max_idle_s

    def _enter_tick(self, time_s: float) -> None:
        if time_s >= self._due_s:
            return
        self._due_s = time_s
        self._due += 1
        self._agenda.at(time_s, self._tick, self._due)

    def _tick(self, number: int) -> None:
        if number != self._due:
            return
        self._due_s = math.inf
        self._has_news = False
        self._is_busy = True
        now_s = self._agenda.now_s
        event = ev.Tick()
        waiting, began_s = self._scheduler.num_pending, time.perf_counter()
        effects = self._scheduler.on(event, now_s)
        measured_s = time.perf_counter() - began_s
        has_decided = bool(effects) or self._scheduler.num_pending != waiting
        solve_s = measured_s if self._options.solve_time == "measured" else self._options.solve_time
        self._counts.ticks += 1
        self._counts.solve_seconds += measured_s
        if solve_s:
            self._agenda.at(now_s + solve_s, self._solved, now_s, event, effects, has_decided)
        else:
            self._solved(now_s, event, effects, has_decided)

    def _solved(self, ticked_s: float, event: ev.Tick, effects: list[ev.Effect], has_decided: bool) -> None:
        self._next_tick_s = self._agenda.now_s + self._options.tick_s
        if has_decided:
            self._take(ticked_s, event, effects)
        self._handle_inbox()

    def _take(self, at_s: float, event: ev.Event, effects: list[ev.Effect]) -> None:
        self._last_change_s = self._agenda.now_s
        if self._log is not None:
            self._log.write(encode_decision(Decision(at_s, event, effects)) + "\n")
        self._listener(event, effects)
