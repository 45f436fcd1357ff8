"""What the latest arrivals let a tick expect: the load, and the length of segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dispatch.candidates.arrivals import Outlook, RecentArrivals
from dispatch.candidates.survey import TickView
from dispatch.options import DispatchOptions
from tests.dispatch.cluster import workers
from tests.dispatch.holding.test_reserve import NOW_S, OPTIONS, RUN_S, STEP_S, Times, past, short
from tridentserve.protocols import PendingRequest

SEGMENT_S, LEAST_S = OPTIONS.segment_s, OPTIONS.least_segment_s


def expect(
    pending: Sequence[PendingRequest],
    num_workers: int = 4,
    arrivals: RecentArrivals | None = None,
    options: DispatchOptions = OPTIONS,
    now_s: float = NOW_S,
) -> Outlook:
    arrivals = arrivals or RecentArrivals(options)
    arrivals.note(pending)
    return arrivals.expect(TickView(Times(), options, workers(num_workers, "EDC"), now_s))


def tight(slack_s: float, number: int = 200) -> list[PendingRequest]:
    """Requests that can all wait for the same time. That many keep eight workers busy, and sixteen half the time."""
    return [short(f"tight {i}", NOW_S * i / number, slack_s) for i in range(number)]


def test_the_load_is_what_came_over_what_the_workers_could_do() -> None:
    """Twelve short requests of 0.4 s and eight huge ones of 160 s came in the last 10 s."""
    arrivals = RecentArrivals(OPTIONS)
    assert expect([], 8, arrivals) == Outlook(0.0, SEGMENT_S), "nothing is known yet"
    found = expect(past(), 8, arrivals)
    assert found.load == pytest.approx((12 * RUN_S + 8 * 4 * STEP_S) / (8 * NOW_S))
    assert expect([], 4, arrivals, now_s=NOW_S + 1.0) == found, "it changes slowly"
    wide = replace(OPTIONS, max_degree=2)
    later = expect([], 8, arrivals, wide, NOW_S + 10.0)
    assert later.load == pytest.approx((12 * RUN_S + 8 * 4 * STEP_S) / (8 * 2 * NOW_S))


def test_segments_are_shorter_where_requests_can_hardly_wait() -> None:
    """A tenth of the slack is the mean time until one of four busy workers is free."""
    assert expect(tight(0.8)).load > 1
    assert expect(tight(0.8)).segment_s == pytest.approx(0.1 * 0.8 * 5, rel=0.01)
    assert expect(tight(0.1)).segment_s == LEAST_S
    assert expect(tight(2.5)).segment_s == SEGMENT_S


def test_on_many_workers_one_is_free_soon_anyway() -> None:
    assert expect(tight(0.8), 8).segment_s > expect(tight(0.8), 4).segment_s
    assert expect(tight(0.8), 16).segment_s == SEGMENT_S


def test_with_little_load_one_is_free_anyway() -> None:
    few = expect(tight(0.8, 50))
    assert few.load == pytest.approx(50 * RUN_S / (4 * NOW_S), rel=0.01)
    assert few.segment_s == SEGMENT_S
    some = expect(tight(0.8, 80))
    assert some.segment_s == pytest.approx(0.1 * 0.8 * 5 / some.load**2, rel=0.01)


def test_a_quarter_of_the_requests_must_be_tight_at_least() -> None:
    loose = [short(f"loose {i}", NOW_S * i / 120, 30.0) for i in range(120)]
    assert expect([*tight(0.8, 30), *loose]).segment_s == SEGMENT_S
    assert expect([*tight(0.8, 60), *loose]).segment_s < SEGMENT_S


def test_requests_that_cannot_be_in_time_say_nothing() -> None:
    late = [short(f"late {i}", NOW_S * i / 80, -0.1) for i in range(80)]
    assert expect(late).segment_s == SEGMENT_S
    assert expect([*late, *tight(2.5, 80)]).segment_s == SEGMENT_S


def test_whole_runs_stay_whole() -> None:
    """The paper's policy has no segments, whatever the deadlines."""
    whole = replace(OPTIONS, segment_s=1e9, least_segment_s=1e9)
    assert expect(tight(0.1), options=whole).segment_s == 1e9
