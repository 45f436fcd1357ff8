"""Threads that wait for a queue with a limit go on when it is over, however short it is and whoever preempts them."""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest
import torch

from tridentserve.engine.live import nixl_link
from tridentserve.engine.live.core_thread import CoreThread
from tridentserve.engine.live.nixl_link import NixlLink
from tridentserve.errors import HandoffError
from tridentserve.events import Event, RequestCancelled, Tick
from tridentserve.scheduler import Scheduler

# A microsecond is over before it is waited for, most times.
SHORT_S = 1e-6
ROUNDS = 6000


def test_a_link_always_hears_that_nothing_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_link, "_POLL_S", SHORT_S)
    link = NixlLink("short-waits", torch.zeros(64, dtype=torch.uint8))
    try:
        for index in range(ROUNDS):
            nothing = link.expect(f"{index}".encode(), timeout_s=0.0)
            assert isinstance(nothing.exception(timeout=20.0), HandoffError)
    finally:
        link.close()


class CountsTicks:
    """In the scheduler's place."""

    num_pending = 0

    def __init__(self) -> None:
        self.ticked = threading.Semaphore(0)

    def on(self, event: Event, now_s: float) -> list[object]:
        if isinstance(event, Tick):
            self.ticked.release()
        return []


def test_every_event_is_followed_by_a_tick() -> None:
    scheduler = CountsTicks()
    tick_s = 100e-6
    thread = CoreThread(cast(Scheduler, scheduler), lambda *_: None, lambda error: None, tick_s)
    thread.start()
    try:
        for index in range(20_000):
            # The next tick is due after any part of that time, so also after next to nothing of it.
            post_s = time.perf_counter() + tick_s * (index % 100) / 100
            while time.perf_counter() < post_s:
                pass
            thread.post(RequestCancelled("nobody"))
            assert scheduler.ticked.acquire(timeout=20.0), "the core waits although a tick is due"
    finally:
        thread.stop()
