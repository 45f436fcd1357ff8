"""The pure scheduler in a thread of its own, fed by a queue: a long solve never delays the event loop."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TypeVar

from tridentserve.scheduling.decision_log import LogEntry, encode_entry
from tridentserve.scheduling.events import Effect, Event, Tick
from tridentserve.scheduling.explanation.recording import RecentDecisions
from tridentserve.scheduling.tick_pacer import TICK_S, SchedulerLike, TickPacer

logger = logging.getLogger(__name__)

T = TypeVar("T")
Listener = Callable[[float, Event, list[Effect]], None]


class CoreThread:
    """Owns the scheduler, and what the scheduler decides with. `post` and `call` may be called from any thread."""

    def __init__(
        self,
        scheduler: SchedulerLike,
        listener: Listener,
        on_crash: Callable[[BaseException], None],
        tick_s: float = TICK_S,
        log_path: Path | None = None,
        recent: RecentDecisions | None = None,
    ) -> None:
        """`listener` is called in this thread with each decision, `on_crash` with an error that ended the thread.
        `tick_s`: see `TickPacer`. The decisions that `recent` keeps are this thread's."""
        self._scheduler = scheduler
        self._listener = listener
        self._on_crash = on_crash
        self._pacer = TickPacer(tick_s)
        self._log_path = log_path
        self._recent = recent or RecentDecisions(0)
        # Not a SimpleQueue: when the thread is preempted for longer than the rest of a short limit, CPython's
        # `SimpleQueue.get(timeout=...)` counts that as no limit and waits for the next item (3.11.7: once in some ten
        # thousand calls with 0.2 ms, once in three thousand with 1 us).
        self._inbox: queue.Queue[tuple[float, Event] | Callable[[], None] | None] = queue.Queue()
        self._last_s = 0.0
        self._started_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="scheduler-core", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the events posted so far; waits for it."""
        self._inbox.put(None)
        self._thread.join(timeout=10.0)

    def post(self, event: Event) -> None:
        self._inbox.put((self.now_s(), event))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the scheduler's thread, after the events posted so far."""
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)

        self._inbox.put(run)
        return answer

    def now_s(self) -> float:
        """The scheduler's time: seconds since this object was made."""
        return time.monotonic() - self._started_s

    def _run(self) -> None:
        try:
            if self._log_path is None:
                self._run_loop(None)
            else:
                with _open_log(self._log_path) as log:
                    self._run_loop(log)
        except BaseException as error:
            self._on_crash(error)
            raise

    def _run_loop(self, log: IO[str] | None) -> None:
        while True:
            due_s = self._pacer.due_s(self._scheduler.num_pending)
            wait_s = None if due_s == math.inf else max(0.0, due_s - self.now_s())
            try:
                item = self._inbox.get(timeout=wait_s) if wait_s != 0.0 else self._inbox.get_nowait()
            except queue.Empty:
                self._tick(log)
                continue
            if item is None:
                return
            if callable(item):
                item()
                continue
            # The time of an event is when it was posted: a solve in between counts as waiting.
            now_s, event = self._advance_clock(item[0]), item[1]
            self._pacer.note_event(event)
            effects = self._scheduler.on(event, now_s)
            self._recent.add(now_s, event, effects)
            _write_entry(log, now_s, event, effects)
            self._listener(now_s, event, effects)

    def _tick(self, log: IO[str] | None) -> None:
        now_s = self._advance_clock(self.now_s())
        outcome = self._pacer.tick(self._scheduler, now_s)
        if outcome.failure is not None and not outcome.is_repeated:
            logger.error("a tick failed", exc_info=outcome.failure)
        # Also a tick without effects: a policy may remember what it saw then, and a replay must see the same.
        self._recent.add(now_s, Tick(), outcome.effects)
        _write_entry(log, now_s, Tick(), outcome.effects)
        if outcome.has_decided:
            self._listener(now_s, Tick(), outcome.effects)
        self._pacer.note_end(self.now_s())

    def _advance_clock(self, at_s: float) -> float:
        """The scheduler's time never goes back: events that were posted during a tick come after it."""
        self._last_s = max(self._last_s, at_s)
        return self._last_s


def _write_entry(log: IO[str] | None, now_s: float, event: Event, effects: list[Effect]) -> None:
    if log is not None:
        try:
            log.write(encode_entry(LogEntry(now_s, event, effects)) + "\n")
        except (OSError, ValueError) as error:  # a full disk is no reason to stop serving
            logger.error("the decision log misses an entry: %s", error)


def _open_log(path: Path) -> IO[str]:
    """An empty log. One that is there already, of a service that has ended, is kept under the time of its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        ended = time.strftime("%Y%m%dT%H%M%S", time.localtime(path.stat().st_mtime))
        path.rename(path.with_name(f"{path.stem}.{ended}{path.suffix}"))
    return path.open("w", buffering=1)
