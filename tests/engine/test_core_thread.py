"""The scheduler's thread: a tick follows every event, and only a failing policy does not end it."""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest

from tridentserve.engine.live.core_thread import CoreThread
from tridentserve.events import Effect, Event, RequestCancelled, Tick
from tridentserve.scheduler import PolicyError, Scheduler

NEWS = RequestCancelled("nobody")


class CountsTicks:
    """In the scheduler's place."""

    num_pending = 0

    def __init__(self) -> None:
        self.ticked = threading.Semaphore(0)
        self.failure: Exception | None = None

    def on(self, event: Event, now_s: float) -> list[Effect]:
        if isinstance(event, Tick):
            self.ticked.release()
            if self.failure is not None:
                raise self.failure
        return []


def test_every_event_is_followed_by_a_tick() -> None:
    """However short the wait for it is: CPython's `SimpleQueue` would wait for ever now and then."""
    scheduler, tick_s = CountsTicks(), 100e-6
    thread = CoreThread(cast(Scheduler, scheduler), lambda *_: None, lambda error: None, tick_s)
    thread.start()
    try:
        for index in range(20_000):
            # The next tick is due after any part of that time, so also after next to nothing of it.
            post_s = time.perf_counter() + tick_s * (index % 100) / 100
            while time.perf_counter() < post_s:
                pass
            thread.post(NEWS)
            assert scheduler.ticked.acquire(timeout=20.0), "the core waits although a tick is due"
    finally:
        thread.stop()


def test_a_policy_that_fails_has_another_try_and_what_was_decided_is_told() -> None:
    scheduler, told, crashes = CountsTicks(), list[list[Effect]](), list[BaseException]()
    thread = CoreThread(cast(Scheduler, scheduler), lambda _, event, effects: told.append(effects), crashes.append)
    decided = cast(Effect, object())
    scheduler.failure = PolicyError("no solver", [decided])
    thread.start()
    for _ in range(2):
        thread.post(NEWS)
        assert scheduler.ticked.acquire(timeout=20.0)
    thread.stop()
    assert told == [[], [decided], [], [decided]]
    assert not crashes


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_any_other_error_ends_the_thread_and_is_told() -> None:
    scheduler, crashes = CountsTicks(), list[BaseException]()
    thread = CoreThread(cast(Scheduler, scheduler), lambda *_: None, crashes.append)
    scheduler.failure = IndexError("books are wrong")
    thread.start()
    thread.post(NEWS)
    assert scheduler.ticked.acquire(timeout=20.0)
    thread.stop()
    assert [str(crash) for crash in crashes] == ["books are wrong"]
    assert not thread.alive
