"""While nothing is lost the earliest deadline goes first, however much it takes; else what takes little does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dispatch import DispatchOptions, IlpDispatcher
from dispatch.candidates.calm import LossMemory, has_lost
from dispatch.candidates.classes import group_by_work
from dispatch.candidates.survey import TickView
from tests.dispatch.cluster import decide, request, workers
from tests.profiler.synthetic import SHAPES, cost_model, step_seconds
from tridentserve.protocols import PendingRequest

SMALL, LARGE = SHAPES[0], SHAPES[2]
TIMES = cost_model()
OPTIONS = DispatchOptions()
VIEWS = workers(1, "EDC")
LARGE_S = 20 * step_seconds(LARGE, 1)
LONG = request("long", LARGE, 3 * LARGE_S)
# It needs a small part of the time, and its deadline is a little later.
SHORT = request("short", SMALL, 3.2 * LARGE_S)
LOST = request("lost", LARGE, 1.5 * LARGE_S, arrival_s=-2 * LARGE_S)
NEVER_POSSIBLE = request("never", LARGE, 0.1 * LARGE_S)


def choose_first(*pending: PendingRequest, options: DispatchOptions = OPTIONS) -> str:
    (assignment,) = decide(IlpDispatcher(TIMES, options), pending, VIEWS, 0.0)
    return assignment.request_ids[0]


def view_tick(now_s: float = 0.0, horizon_s: float = 1.0) -> TickView:
    tick = TickView(TIMES, OPTIONS, VIEWS, now_s)
    tick.pressure.horizon_s = horizon_s
    return tick


def test_the_earliest_deadline_goes_first_while_nothing_is_lost() -> None:
    assert choose_first(LONG, SHORT) == "long"
    never = replace(OPTIONS, objective=replace(OPTIONS.objective, calm=None))
    assert choose_first(LONG, SHORT, options=never) == "short"


def test_what_takes_little_goes_first_once_something_is_lost() -> None:
    assert choose_first(LONG, SHORT, LOST) == "short"


def test_a_request_that_never_could_be_in_time_changes_nothing() -> None:
    assert choose_first(LONG, SHORT, NEVER_POSSIBLE) == "long"


@pytest.mark.parametrize(
    ("pending", "lost"),
    [
        ([], False),
        ([LONG, SHORT], False),
        ([LONG, LOST], True),
        ([NEVER_POSSIBLE], False),
        # The first of its work never could be in time, the second one could.
        ([request("a", LARGE, 0.1 * LARGE_S, arrival_s=-9 * LARGE_S), LOST], True),
        ([request("other", SMALL, 0.0, model="unknown")], False),
    ],
)
def test_only_what_could_have_been_in_time_is_lost(pending: list[PendingRequest], lost: bool) -> None:
    models = frozenset(entry.spec.model for entry in pending)
    assert has_lost(group_by_work(pending, models), view_tick()) == lost


def test_a_loss_counts_for_some_horizons() -> None:
    memory = LossMemory(4.0)
    waiting = group_by_work([request("later", LARGE, 100.0)], frozenset({"one"}))
    losing = group_by_work([LOST], frozenset({"one"}))
    assert memory.is_calm(waiting, view_tick(0.0))
    assert not memory.is_calm(losing, view_tick(1.0))
    assert not memory.is_calm(waiting, view_tick(4.9))
    assert not memory.is_calm(waiting, view_tick(8.9, horizon_s=2.0))
    assert memory.is_calm(waiting, view_tick(5.0))
