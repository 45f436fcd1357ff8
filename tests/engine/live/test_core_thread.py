"""The scheduler's thread: a tick follows every event, and only a failing policy does not end it."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from tests.scheduling.failing import REQUESTS, check_failed_and_served, failing_scheduler
from tests.support.decision_log import read_log
from tests.support.waiting import PATIENCE_S
from tridentserve.engine.live.core_thread import CoreThread
from tridentserve.plans import StageSpan
from tridentserve.scheduling.events import (
    CheckpointSaved,
    Effect,
    Event,
    Finish,
    RequestArrived,
    RequestCancelled,
    RunPlan,
    StageFinished,
    Tick,
    WorkerJoined,
)
from tridentserve.scheduling.scheduler import PolicyError
from tridentserve.testing import make_request

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
    """However short the wait for it is: CPython's `SimpleQueue` would wait without end now and then."""
    scheduler, tick_s = CountsTicks(), 100e-6
    thread = CoreThread(scheduler, lambda *_: None, lambda error: None, tick_s)
    thread.start()
    try:
        for index in range(20_000):
            # The next tick is due after any part of that time, so also after next to nothing of it.
            post_s = time.perf_counter() + tick_s * (index % 100) / 100
            while time.perf_counter() < post_s:
                pass
            thread.post(NEWS)
            assert scheduler.ticked.acquire(timeout=PATIENCE_S), "the core waits although a tick is due"
    finally:
        thread.stop()


def test_a_policy_that_fails_has_another_try_and_its_decisions_are_reported() -> None:
    scheduler, told, crashes = CountsTicks(), list[list[Effect]](), list[BaseException]()
    thread = CoreThread(scheduler, lambda _, event, effects: told.append(effects), crashes.append)
    decided = cast(Effect, object())
    scheduler.failure = PolicyError("no solver", [decided])
    thread.start()
    for _ in range(2):
        thread.post(NEWS)
        assert scheduler.ticked.acquire(timeout=PATIENCE_S)
    thread.stop()
    assert told == [[], [decided], [], [decided]]
    assert not crashes


def test_a_policy_that_fails_at_first_serves_everybody_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The scene of `tests/engine/simulated/test_failing_policy.py`; plans end as soon as they are given out."""
    scheduler, dispatcher, specs, _ = failing_scheduler()
    unfinished, done, log = set(REQUESTS), threading.Event(), tmp_path / "decisions.jsonl"

    def carry_out(now_s: float, event: Event, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, RunPlan):
                spans = tuple(StageSpan(stage, now_s, now_s) for stage in effect.plan.stages)
                thread.post(StageFinished(effect.plan.plan_id, spans))
            elif isinstance(effect, Finish):
                unfinished.discard(effect.request_id)
                if not unfinished:
                    done.set()

    crashes = list[BaseException]()
    thread = CoreThread(scheduler, carry_out, crashes.append, log_path=log)
    for spec in specs:
        thread.post(WorkerJoined(spec))
    for name in REQUESTS:
        thread.post(RequestArrived(make_request(name)))
    with caplog.at_level(logging.ERROR):
        thread.start()
        assert done.wait(timeout=PATIENCE_S)
        thread.stop()
    assert not crashes
    check_failed_and_served(read_log(log), dispatcher)
    (logged,) = caplog.records
    assert logged.exc_info is not None


def test_state_checkpoints_do_not_delay_waiting_requests() -> None:
    """They come more often than waiting requests are looked at, and are no reason for a tick themselves."""
    scheduler = CountsTicks()
    scheduler.num_pending = 1
    thread = CoreThread(scheduler, lambda *_: None, lambda error: None)
    thread.post(NEWS)
    thread.start()
    try:
        assert scheduler.ticked.acquire(timeout=PATIENCE_S)
        stop_s = time.monotonic() + PATIENCE_S
        while not (has_ticked := scheduler.ticked.acquire(timeout=0.01)) and time.monotonic() < stop_s:
            thread.post(CheckpointSaved(1, 1, "keeper"))
        assert has_ticked
    finally:
        thread.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_any_other_error_ends_the_thread_and_is_reported() -> None:
    scheduler, crashes = CountsTicks(), list[BaseException]()
    thread = CoreThread(scheduler, lambda *_: None, crashes.append)
    scheduler.failure = IndexError("books are wrong")
    thread.start()
    thread.post(NEWS)
    assert scheduler.ticked.acquire(timeout=PATIENCE_S)
    thread.stop()
    assert [str(crash) for crash in crashes] == ["books are wrong"]
    assert not thread.alive


def test_functions_run_in_the_thread_after_the_events_before_them() -> None:
    seen: list[str] = []
    thread = CoreThread(CountsTicks(), lambda *_: seen.append("an event"), lambda error: None, tick_s=100.0)
    thread.post(NEWS)

    def tell() -> str:
        seen.append("a function")
        return threading.current_thread().name

    def fail() -> None:
        raise IndexError

    name, failed = thread.call(tell), thread.call(fail)
    thread.start()
    try:
        assert name.result(timeout=PATIENCE_S) == "scheduler-core"
        with pytest.raises(IndexError):
            failed.result(timeout=PATIENCE_S)
    finally:
        thread.stop()
    assert seen[:2] == ["an event", "a function"]
