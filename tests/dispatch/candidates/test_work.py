"""Waiting requests by what is left of them: their work is found once, and those that stand alike are one class."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from dispatch import DispatchOptions
from dispatch.candidates.classes import by_deadline, split_by_standing
from dispatch.candidates.survey import TickView
from dispatch.candidates.work import KnownWork, Work
from tests.dispatch.cluster import request, workers
from tests.profiler.synthetic import SHAPES, cost_model


@given(st.lists(st.sampled_from([0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 3.1, 4.0, 9.0, 50.0]), max_size=40))
def test_those_that_stand_alike_are_found_without_a_look_at_each(slos_s: list[float]) -> None:
    tick = TickView(cost_model(), DispatchOptions(), workers(2, "EDC"), now_s=0.0)
    requests = sorted((request(f"r{i}", SHAPES[1], slo_s) for i, slo_s in enumerate(slos_s)), key=by_deadline)
    appraisal = tick.appraise(Work.from_pending(request("any", SHAPES[1])))
    by_hand = groupby(requests, key=lambda each: appraisal.find_standing(each.deadline_s))
    expected = [(standing, list(alike)) for standing, alike in by_hand]
    assert [(standing, list(alike)) for standing, alike in split_by_standing(requests, appraisal)] == expected


def test_work_is_found_once_for_as_long_as_a_request_waits_unchanged() -> None:
    known = KnownWork()
    waiting = [request(f"r{i}", SHAPES[i % 2], steps_done=i % 3) for i in range(1000)]
    works = [known.find(each) for each in waiting]
    assert works == [Work.from_pending(each) for each in waiting]
    assert all(known.find(each) is work for each, work in zip(waiting, works, strict=True))
    known.start_tick()
    assert all(known.find(each) is work for each, work in zip(waiting[:10], works, strict=False))
    known.start_tick()
    assert [known.find(each) for each in waiting] == works
    assert known.find(waiting[9]) is works[9]
    assert known.find(waiting[10]) is not works[10]
