"""Drives the scheduler on simulated time, as the live engine's thread does on real time."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import IO

from tridentserve.engine.simulated.agenda import Agenda
from tridentserve.engine.simulated.options import SimulationOptions
from tridentserve.engine.simulated.result import Counts
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry, encode_entry
from tridentserve.scheduling.tick_pacer import SchedulerLike, TickOutcome, TickPacer, process_event

logger = logging.getLogger(__name__)


class SimulatedCore:
    """Owns the scheduler. `listener` carries out the effects of an event.

    While a tick is being solved the workers continue, and their reports wait: the effects of the tick come first.
    """

    def __init__(
        self,
        scheduler: SchedulerLike,
        agenda: Agenda,
        listener: Callable[[ev.Event, list[ev.Effect]], None],
        options: SimulationOptions,
        counts: Counts,
    ) -> None:
        self._scheduler = scheduler
        self._agenda = agenda
        self._listener = listener
        self._options = options
        self._counts = counts
        self.log: IO[str] | None = None
        """The file of the decisions."""
        self._inbox: deque[tuple[float, ev.Event]] = deque()
        self._is_busy = self._is_stopped = self._is_following = False
        self._pacer = TickPacer(options.tick_s, options.retry_s)
        # The next tick is entered for this time, under the number `_due`.
        self._due_s = math.inf
        self._due = 0
        self._last_change_s = 0.0

    def post(self, event: ev.Event) -> None:
        """An event happens now. May be called from the listener."""
        if self._is_stopped or self._is_following:
            return
        self._inbox.append((self._agenda.now_s, event))
        if not self._is_busy:
            self._is_busy = True
            self._handle_inbox()

    def stop(self) -> None:
        """The scheduler's process ends: no event reaches it any more, and what it decides in a tick that has begun is
        lost."""
        self._is_stopped = True
        self._inbox.clear()

    def follow(self, event: ev.Event, at_s: float) -> list[ev.Effect]:
        """An event of a log that is followed. Until `take_over` ticks come where the log has them, and what workers
        report is dropped, as the log has that too."""
        self._is_following = True
        if isinstance(event, ev.Tick):
            effects = self._pacer.tick(self._scheduler, at_s).effects
            self._pacer.note_end(at_s)
        else:
            self._pacer.note_event(event)
            effects, _ = process_event(self._scheduler, event, at_s)
        self._tell(event, effects)
        return effects

    def take_over(self) -> None:
        """The log is not followed any more."""
        self._is_following = False
        self._enter_tick()

    def _handle_inbox(self) -> None:
        """Process the events that wait, and enter the next tick."""
        while self._inbox:
            posted_s, event = self._inbox.popleft()
            self._pacer.note_event(event)
            # The time of an event is when it was posted, as in the live engine: a solve in between is waiting.
            effects = self._scheduler.on(event, posted_s)
            self._write_entry(posted_s, event, effects)
            self._tell(event, effects)
        self._is_busy = False
        self._enter_tick()

    def _enter_tick(self) -> None:
        """Enter the next tick into the agenda, unless one is there that comes as early."""
        due_s = max(self._agenda.now_s, self._pacer.due_s(self._scheduler.num_pending))
        if due_s >= self._due_s or (not self._pacer.has_news and self._is_stuck()):
            return
        self._due_s = due_s
        self._due += 1
        self._agenda.tick_at(due_s, self._tick, self._due)

    def _is_stuck(self) -> bool:
        """True when nothing has happened for long and no event is left."""
        return not self._agenda.has_work and self._agenda.now_s - self._last_change_s > self._options.max_idle_s

    def _tick(self, number: int) -> None:
        if number != self._due or self._is_stopped:
            return
        self._due_s = math.inf
        self._is_busy = True
        now_s, began_s = self._agenda.now_s, time.perf_counter()
        outcome = self._pacer.tick(self._scheduler, now_s)
        measured_s = time.perf_counter() - began_s
        solve_s = measured_s if self._options.solve_time == "measured" else self._options.solve_time
        self._counts.ticks += 1
        self._counts.solve_seconds += measured_s
        self._note_failure(outcome, now_s)
        if solve_s:
            self._agenda.call_at(now_s + solve_s, self._finish_tick, now_s, outcome)
        else:
            self._finish_tick(now_s, outcome)

    def _note_failure(self, outcome: TickOutcome, now_s: float) -> None:
        if outcome.failure is not None:
            self._counts.failed_ticks += 1
            if not outcome.is_repeated:
                logger.error("the tick at %.3f s of the simulation failed", now_s, exc_info=outcome.failure)

    def _finish_tick(self, ticked_s: float, outcome: TickOutcome) -> None:
        if self._is_stopped:
            return
        self._pacer.note_end(self._agenda.now_s)
        # Also a tick without effects: a policy may remember what it saw then, and a replay must see the same.
        self._write_entry(ticked_s, ev.Tick(), outcome.effects)
        if outcome.has_decided:
            self._tell(ev.Tick(), outcome.effects)
        self._handle_inbox()

    def _write_entry(self, at_s: float, event: ev.Event, effects: list[ev.Effect]) -> None:
        if self.log is not None:
            self.log.write(encode_entry(LogEntry(at_s, event, effects)) + "\n")

    def _tell(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        self._last_change_s = self._agenda.now_s
        self._listener(event, effects)
