"""FIFO, SRTF with aging, and EDF as orders of turns."""

from __future__ import annotations

import pytest

from dispatch.candidates.work import Work
from dispatch.policies.greedy.orders import FULLY_AGED, IfItWaits, compute_priority, edf, fifo, srtf
from dispatch.policies.greedy.work import WorkTimes
from tests.dispatch.cluster import request
from tests.dispatch.policies.scenes import LARGE, SMALL, TINY
from tests.profiler.synthetic import cost_model
from tridentserve.requests import Shape

WORK = WorkTimes(cost_model(), aligned=False)


def test_fifo_is_by_arrival_and_nobody_overtakes() -> None:
    turns = list(
        fifo(
            [request("b", TINY, arrival_s=2.0), request("a", LARGE, arrival_s=1.0)],
            WORK,
            now_s=3.0,
            find_work=Work.from_pending,
        )
    )
    assert [turn.request.spec.request_id for turn in turns] == ["a", "b"]
    assert {turn.if_it_waits for turn in turns} == {IfItWaits.BLOCK}


def test_edf_keeps_workers_for_the_first_once_it_is_late() -> None:
    pending = [request("late", TINY, slo_s=1.0), request("later", TINY, slo_s=2.0)]
    assert [turn.if_it_waits for turn in edf(pending, WORK, now_s=0.5, find_work=Work.from_pending)] == [
        IfItWaits.PASS
    ] * 2
    assert [turn.if_it_waits for turn in edf(pending, WORK, now_s=3.0, find_work=Work.from_pending)] == [
        IfItWaits.HOLD,
        IfItWaits.PASS,
    ]


@pytest.mark.parametrize(
    ("overtime_s", "expected"),
    [(-1.0, 0), (0.0, 0), (0.1, 9), (2.0, 8), (3.9, 8), (17.9, 1), (18.0, 0), (1000.0, 0)],
)
def test_priority_grows_with_overtime_in_runtimes(overtime_s: float, expected: int) -> None:
    assert compute_priority(overtime_s, runtime_s=2.0) == expected


def test_srtf_counts_what_is_left() -> None:
    pending = [request("large", LARGE), request("tiny", TINY), request("rest", LARGE, steps_done=20)]
    turns = list(srtf(pending, WORK, now_s=0.0, find_work=Work.from_pending))
    assert [turn.request.spec.request_id for turn in turns] == ["tiny", "rest", "large"]
    assert {turn.if_it_waits for turn in turns} == {IfItWaits.PASS}


def test_late_requests_go_after_those_in_time_until_they_have_aged() -> None:
    late, in_time = request("late", TINY, slo_s=0.1), request("in-time", SMALL)
    runtime_s = WORK.run_s(late, 1)
    assert [
        turn.request.spec.request_id for turn in srtf([late, in_time], WORK, now_s=0.1, find_work=Work.from_pending)
    ] == ["in-time", "late"]
    turns = list(srtf([in_time, late], WORK, now_s=0.1 + FULLY_AGED * runtime_s, find_work=Work.from_pending))
    assert [turn.request.spec.request_id for turn in turns] == ["late", "in-time"]
    assert turns[0].if_it_waits is IfItWaits.HOLD


def test_only_the_longest_overdue_is_kept_workers_for() -> None:
    pending = [request("second", TINY, slo_s=2.0), request("first", LARGE, slo_s=1.0), request("new", TINY)]
    turns = list(srtf(pending, WORK, now_s=500.0, find_work=Work.from_pending))
    assert [(turn.request.spec.request_id, turn.if_it_waits) for turn in turns] == [
        ("first", IfItWaits.HOLD),
        ("new", IfItWaits.PASS),
        ("second", IfItWaits.PASS),
    ]


def test_a_size_that_was_not_profiled_has_no_turn() -> None:
    assert list(srtf([request("r", Shape(8192, 8192))], WORK, now_s=0.0, find_work=Work.from_pending)) == []
