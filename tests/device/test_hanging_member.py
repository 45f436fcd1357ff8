"""A member of a group that hangs: the others notice it soon while they step together, and take no slow one for it."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from tests.device.recording import CPU, RecordingDevice, RecordingMark, use_recording_device
from tests.parallel.conftest import pool
from tests.parallel.members import TIMEOUT_S, Member, Pool
from tests.support.waiting import PATIENCE_S
from tridentserve.device import WorkMark
from tridentserve.errors import GroupError
from tridentserve.parallel import SequenceGroup, StepPatience

__all__ = ["pool"]
HANG_TIMEOUT_S = 0.5
GAVE_UP = re.compile(r"Timed out waiting (\d+)ms|Application timeout caused pair closure")


class DeviceWithGloo(RecordingDevice):
    """Like a GPU it has a second group for commands."""

    kind = "cpu"


@contextmanager
def on_device(kind: str) -> Iterator[None]:
    if kind == "host":
        yield
        return
    with use_recording_device(DeviceWithGloo()):
        yield


def step_without_end(member: Member, name: str, kind: str, collective: str) -> tuple[str, float]:
    """The error that ends the steps, and the bound of the member's waits then."""
    with on_device(kind):
        group = member.group(name)
        with StepPatience(group, HANG_TIMEOUT_S, None) as patience:
            waits: Any = group._get_members(group._has_control)._get_backend(CPU)
            try:
                for step in itertools.count():
                    meet(group, collective)
                    patience.note_boundary()
                    if step == 3:
                        member.store.set(f"{name}: rank {member.rank} steps", "")
            except GroupError as error:
                return str(error), waits.options._timeout.total_seconds()
    raise AssertionError("the steps have no end")


def meet(group: SequenceGroup, collective: str) -> None:
    """A collective that ends when all members have called it."""
    if collective == "command":
        group.agree()
    elif collective == "exchange":
        block = torch.zeros(1 << 10)
        group.all_to_all([block] * group.size, [tuple(block.shape)] * group.size)
    else:
        group.start_gather(torch.empty(group.size * 8), torch.ones(8), range(group.size))()


@pytest.mark.parametrize("hanging", [0, 2])
@pytest.mark.parametrize(
    ("kind", "collective"),
    [("host", "command"), ("host", "exchange"), ("host", "gather"), ("with commands apart", "command")],
)
def test_the_others_notice_it(pool: Pool, kind: str, collective: str, hanging: int) -> None:
    """Where they wait for it, whatever for, long before the timeout of the group."""
    name = f"{hanging} hangs in a {collective}, {kind}"
    process = pool._members[hanging][0]
    pool.post(step_without_end, 3, name, kind, collective)
    pool.store.wait([f"{name}: rank {rank} steps" for rank in range(3)])
    os.kill(process.pid, signal.SIGSTOP)
    try:
        answers = pool.results([rank for rank in range(3) if rank != hanging])
    finally:
        pool.kill(hanging)
        pool.replace(hanging)
    # One of them has waited too long. When it leaves, the connections of others to it break; and where it waits for
    # two things at once, either may be the first to give up, which closes the connection of the other.
    assert any(GAVE_UP.search(error) for error, _ in answers), answers
    assert all("group" in error for error, _ in answers)
    bounds_s = [bound_s for _, bound_s in answers]
    assert all(HANG_TIMEOUT_S <= bound_s < TIMEOUT_S for bound_s in bounds_s)
    waited_ms = [int(found[1]) for error, _ in answers if (found := GAVE_UP.search(error)) and found[1]]
    assert all(HANG_TIMEOUT_S * 1000 <= waited < TIMEOUT_S * 1000 for waited in waited_ms)


def step_slowly(member: Member, name: str) -> int:
    """The last member is slow."""
    group, steps = member.group(name), 0
    with StepPatience(group, 0.1, None) as patience:
        for _ in range(4):
            group.agree()
            patience.note_boundary()
            time.sleep(0.5 if member.rank == member.size - 1 else 0.0)
            steps += 1
        group.agree()
    return steps


@pytest.mark.parametrize("size", [2, 3])
def test_a_slow_member_is_not_taken_for_one(pool: Pool, size: int) -> None:
    """Its steps take much longer than the time after which one hangs. All know how long they take, also those who get
    the command before it has come."""
    assert pool.run(step_slowly, size, "one is slow") == [4] * size


# The bound.


class LimitedGroup:
    """A group of which only the bounds of its waits are known."""

    def __init__(self) -> None:
        self.device, self.limits, self.compiled = CPU, list[float | None](), set[Any]()

    def limit_waits(self, timeout_s: float | None) -> None:
        self.limits.append(timeout_s)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def step(self, patience: StepPatience, took_s: float) -> None:
        self.now_s += took_s
        patience.note_boundary()


def bound(group: LimitedGroup, compiled: str | None = None) -> StepPatience:
    """At the first command of a plan."""
    patience = StepPatience(cast(SequenceGroup, group), 10.0, compiled)
    patience.note_boundary()
    return patience


def test_the_slowest_step_so_far_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    group, clock = LimitedGroup(), Clock(monkeypatch)
    with bound(group) as patience:
        assert group.limits == [], "the first step may be any time away"
        for took_s in (3.0, 1.0, 3.0, 8.0):
            clock.step(patience, took_s)
    assert group.limits == [16.0, 26.0, None]


def test_a_step_counts_when_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given to a GPU in a moment, and then the queue is full."""
    group, clock, marks = LimitedGroup(), Clock(monkeypatch), list[RecordingMark]()

    class Queue(RecordingDevice):
        def mark_work(self) -> WorkMark | None:
            marks.append(RecordingMark([], len(marks)))
            marks[-1].has_ended = False
            return marks[-1]

    with use_recording_device(Queue()), bound(group) as patience:
        clock.step(patience, 0.1)
        clock.step(patience, 0.1)
        assert group.limits == []
        marks[0].has_ended = True
        clock.step(patience, 19.8)
        assert group.limits == [10 + 2 * 20.0]
    assert group.limits[1:] == [None]


def test_members_that_may_compile_have_the_time_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    group, clock = LimitedGroup(), Clock(monkeypatch)
    for _ in range(2):  # the second plan after one that was stopped on its way
        with bound(group, "512x512") as patience:
            clock.step(patience, 1.0)
        assert group.limits == []
    patience.note_all_steps()
    with bound(group, "1024x1024") as patience:
        clock.step(patience, 1.0)
    assert group.limits == [], "the code for another size may be another"
    with bound(group, "512x512") as patience:
        clock.step(patience, 1.0)
    assert group.limits == [12.0, None]


def limit_and_restore(member: Member) -> list[float]:
    group, found = member.group("limits", timeout_s=PATIENCE_S), []
    assert group._process_group is not None
    backend: Any = group._process_group._get_backend(CPU)
    for limit_s in (2.0, 10 * PATIENCE_S, 3.0, None):
        group.limit_waits(limit_s)
        found.append(backend.options._timeout.total_seconds())
    return found


def test_the_timeout_of_the_group_is_the_longest(pool: Pool) -> None:
    assert pool.run(limit_and_restore, 1) == [[2.0, PATIENCE_S, 3.0, PATIENCE_S]]
