"""The pure scheduler in a thread of its own, fed by a queue: a long solve never delays the event loop."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tridentserve.decisions import Decision, encode_decision
from tridentserve.events import Effect, Event, Tick, may_change_plans
from tridentserve.scheduler import PolicyError, Scheduler

# While requests wait, dispatch is tried again this often even if nothing has happened: deadlines slip by themselves.
_RETRY_S = 0.25

logger = logging.getLogger(__name__)

Listener = Callable[[float, Event, list[Effect]], None]


class CoreThread:
    """Owns the scheduler. `post` may be called from any thread; `listener` is called in this one.

    A tick follows events at once, but at most every `tick_s`. `on_crash` hears of an error that ended the thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        listener: Listener,
        on_crash: Callable[[BaseException], None],
        tick_s: float = 0.005,
        log_path: Path | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._listener = listener
        self._on_crash = on_crash
        self._tick_s = tick_s
        self._log_path = log_path
        # Not a SimpleQueue: when the thread is preempted for longer than the rest of a short limit, CPython's
        # `SimpleQueue.get(timeout=...)` counts that as no limit and waits for the next item (3.11.7: once in some ten
        # thousand calls with 0.2 ms, once in three thousand with 1 us).
        self._inbox: queue.Queue[tuple[float, Event] | None] = queue.Queue()
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

    def now_s(self) -> float:
        """The scheduler's time: seconds since this object was made."""
        return time.monotonic() - self._started_s

    def _run(self) -> None:
        try:
            if self._log_path is None:
                self._loop(None)
            else:
                with _new_log(self._log_path) as log:
                    self._loop(log)
        except BaseException as error:
            self._on_crash(error)
            raise

    def _loop(self, log: IO[str] | None) -> None:
        next_tick_s = 0.0
        dirty = False
        while True:
            wait_s = max(0.0, next_tick_s - self.now_s()) if dirty else None
            if wait_s is None and self._scheduler.num_pending:
                wait_s = _RETRY_S
            try:
                item = self._inbox.get(timeout=wait_s) if wait_s != 0.0 else self._inbox.get_nowait()
            except queue.Empty:
                self._handle(Tick(), self.now_s(), log)
                next_tick_s, dirty = self.now_s() + self._tick_s, False
                continue
            if item is None:
                return
            # The time of an event is when it was posted: a solve in between counts as waiting.
            self._handle(item[1], item[0], log)
            dirty = dirty or may_change_plans(item[1])

    def _handle(self, event: Event, at_s: float, log: IO[str] | None) -> None:
        now_s = self._last_s = max(self._last_s, at_s)
        waiting = self._scheduler.num_pending
        try:
            effects = self._scheduler.on(event, now_s)
        except PolicyError as error:  # requests wait, what runs goes on, the next tick may do better
            logger.exception("a tick failed")
            effects = error.effects
        if isinstance(event, Tick) and not effects and self._scheduler.num_pending == waiting:
            return  # nothing was decided: not even that a request waits for a worker of its own from now on
        if log is not None:
            try:
                log.write(encode_decision(Decision(now_s, event, effects)) + "\n")
            except (OSError, ValueError) as error:  # a full disk is no reason to stop serving
                logger.error("the decision log misses an entry: %s", error)
        self._listener(now_s, event, effects)


def _new_log(path: Path) -> IO[str]:
    """An empty log. One that is there already, of a service that has ended, is kept under the time of its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        ended = time.strftime("%Y%m%dT%H%M%S", time.localtime(path.stat().st_mtime))
        path.rename(path.with_name(f"{path.stem}.{ended}{path.suffix}"))
    return path.open("w", buffering=1)
