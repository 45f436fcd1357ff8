"""The times of ticks: after news at once but not too often, now and then while requests wait, else never."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tridentserve.scheduling import events as ev
from tridentserve.scheduling.scheduler import PolicyError
from tridentserve.scheduling.tick_pacer import TickPacer

TICK_S, RETRY_S = 5, 250  # whole numbers of milliseconds: sums are exact
NEWS, NO_NEWS = ev.RequestCancelled("nobody"), ev.CheckpointSaved(1, 1, "keeper")


@dataclass
class Asked:
    """In the scheduler's place. `failures`: by the number of the tick, from 0."""

    num_pending: int = 0
    failures: dict[int, PolicyError] = field(default_factory=dict)
    effects: list[ev.Effect] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)

    def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        if not isinstance(event, ev.Tick):
            return []
        self.ticks.append(now_s)
        if (failure := self.failures.get(len(self.ticks) - 1)) is not None:
            raise failure
        return list(self.effects)


@dataclass(frozen=True)
class Happening:
    """An event after `after` milliseconds, and how many requests wait from then on."""

    after: int
    is_news: bool
    num_pending: int


@dataclass(frozen=True)
class Taken:
    """An event that the scheduler has been given."""

    at: float
    happening: Happening


happenings = st.lists(st.builds(Happening, st.integers(0, 600), st.booleans(), st.integers(0, 1)), max_size=12)


@dataclass(frozen=True)
class Ticked:
    """A tick, from when to when."""

    start: float
    end: float


def drive(pacer: TickPacer, scheduler: Asked, happened: list[Happening], solve_ms: int) -> Iterator[Ticked | Taken]:
    """Take in events and make ticks as the engines do: all that has happened by now comes before a tick that is due.
    The timeline ends five retries after the last event."""
    times = list(accumulate(happening.after for happening in happened))
    queue = list(zip(times, happened, strict=True))
    now, end = 0.0, (times[-1] if times else 0) + 5.0 * RETRY_S
    while True:
        due = pacer.due_s(scheduler.num_pending)
        if queue and queue[0][0] <= max(now, due):
            at, happening = queue.pop(0)
            now = max(now, at)
            scheduler.num_pending = happening.num_pending
            pacer.note_event(NEWS if happening.is_news else NO_NEWS)
            yield Taken(now, happening)
        elif due <= end:
            start = max(now, due)
            pacer.tick(scheduler, start)
            now = start + solve_ms
            pacer.note_end(now)
            yield Ticked(start, now)
        else:
            return


@given(happenings, st.sampled_from([0, 1, 7, 300]), st.booleans())
@example([Happening(0, True, 1), *[Happening(200, False, 1)] * 5], 0, False)  # copies of states put no tick off
def test_every_tick_has_a_reason_and_is_in_time(happened: list[Happening], solve_ms: int, fails: bool) -> None:
    """A policy that fails makes no difference."""
    failures = dict.fromkeys(range(1000), PolicyError("no solver")) if fails else {}
    last_end, since_then = -math.inf, list[Taken]()
    waiting = 0
    timeline = list(drive(TickPacer(TICK_S, RETRY_S), Asked(failures=failures), happened, solve_ms))
    for entry in timeline:
        if isinstance(entry, Taken):
            since_then.append(entry)
            waiting = entry.happening.num_pending
            continue
        news_at = next((taken.at for taken in since_then if taken.happening.is_news), math.inf)
        if news_at < math.inf:
            assert entry.start == max(news_at, last_end + TICK_S)
        else:
            assert waiting
            assert entry.start in (last_end + RETRY_S, *(taken.at for taken in since_then))
            assert entry.start >= last_end + RETRY_S
        last_end, since_then = entry.end, []
    assert not any(taken.happening.is_news for taken in since_then), "news is followed by a tick"
    if waiting:
        assert isinstance(timeline[-1], Ticked), "requests that wait are looked at until the end"


def test_nothing_is_due_before_anything_has_happened() -> None:
    pacer = TickPacer()
    assert pacer.due_s(0) == math.inf
    pacer.note_event(NO_NEWS)
    assert (pacer.due_s(0), pacer.has_news) == (math.inf, False)
    pacer.note_event(NEWS)
    assert pacer.due_s(0) == -math.inf


def test_the_default_paces() -> None:
    pacer = TickPacer()
    pacer.note_event(NEWS)
    pacer.tick(Asked(), 1.0)
    pacer.note_end(1.5)
    assert pacer.due_s(0) == math.inf
    assert pacer.due_s(1) == 1.75
    pacer.note_event(NEWS)
    assert pacer.due_s(1) == pytest.approx(1.505)


def test_a_tick_that_fails_gives_what_was_decided_before_and_says_whether_it_failed_so_before() -> None:
    moved = ev.Yield(1, "before the failure")
    first, again, other = PolicyError("no solver", [moved]), PolicyError("no solver"), PolicyError("no memory")
    scheduler = Asked(failures={0: first, 1: again, 2: other, 4: other}, effects=[ev.Abort("r", 1, "later")])
    pacer = TickPacer()
    outcomes = [pacer.tick(scheduler, float(now)) for now in range(5)]
    assert [outcome.failure for outcome in outcomes] == [first, again, other, None, other]
    assert [outcome.is_repeated for outcome in outcomes] == [False, True, False, False, False]
    assert [outcome.effects for outcome in outcomes] == [[moved], [], [], scheduler.effects, []]
    assert [outcome.has_decided for outcome in outcomes] == [True, False, False, True, False]


def test_an_error_that_is_not_the_policys_is_raised() -> None:
    class Broken(Asked):
        def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
            raise IndexError("books are wrong")

    with pytest.raises(IndexError, match="books are wrong"):
        TickPacer().tick(Broken(), 0.0)


def test_a_tick_that_only_moves_a_request_has_decided() -> None:
    class Starts(Asked):
        def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
            self.num_pending -= 1
            return []

    assert TickPacer().tick(Starts(num_pending=1), 0.0).has_decided


def test_without_news_the_time_between_ticks_grows_with_the_time_since_the_last_news() -> None:
    pacer, times = TickPacer(), [0.0]
    pacer.note_event(NEWS)
    while times[-1] < 200.0:
        pacer.tick(Asked(), times[-1])
        pacer.note_end(times[-1])
        times.append(pacer.due_s(1))
    steps = [later - earlier for earlier, later in pairwise(times)]
    assert steps == pytest.approx([min(max(0.25, time_s / 4), 10.0) for time_s in times[:-1]])
    pacer.note_event(NEWS)
    pacer.tick(Asked(), 200.0)
    pacer.note_end(200.0)
    assert pacer.due_s(1) == 200.25
