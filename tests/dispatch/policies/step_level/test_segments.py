"""The policy of segments: its order, its degrees, and how long a segment is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.assignment.assigning import count_segment_steps
from dispatch.options import DispatchOptions
from dispatch.policies.segments import Segments
from tests.dispatch.cluster import decide, request, workers
from tests.dispatch.policies.step_engine import HUGE, LARGE, SMALL, TIMES, StepEngine
from tests.profiler.synthetic import step_seconds
from tridentserve.protocols import PendingRequest
from tridentserve.requests import Shape
from tridentserve.stages import Stage


def degrees(pending: list[PendingRequest], count: int) -> dict[str, int]:
    found = decide(Segments(TIMES), pending, workers(count, "EDC"), 0.0)
    return {each.request_ids[0]: len(each.diffuse) for each in found}


def run_s(shape: Shape, degree: int, steps: int) -> float:
    ends_s = sum(TIMES.seconds("one", stage, shape) for stage in (Stage.ENCODE, Stage.DECODE))
    return ends_s + steps * step_seconds(shape, degree)


def test_the_earliest_deadline_that_can_be_met_goes_first() -> None:
    pending = [request("later", SMALL, 90.0), request("soon", SMALL, 60.0), request("hopeless", SMALL, 0.001)]
    assert degrees(pending, 1) == {"soon": 1}


def test_hopeless_requests_go_last_and_the_smallest_of_them_first() -> None:
    pending = [request("huge", HUGE, 0.001), request("small", SMALL, 0.001), request("hopeful", SMALL, 90.0)]
    assert list(degrees(pending, 1)) == ["hopeful"]
    assert list(degrees(pending[:2], 1)) == ["small"]


def test_a_request_alone_has_its_optimal_degree() -> None:
    optimal = TIMES.optimal_degree("one", Stage.DIFFUSE, LARGE)
    assert optimal > 1
    assert degrees([request("r", LARGE)], 8) == {"r": optimal}


def test_a_deadline_that_the_optimal_degree_misses_takes_the_narrowest_that_meets_it() -> None:
    optimal, steps = TIMES.optimal_degree("one", Stage.DIFFUSE, SMALL), 100
    wider = 2 * optimal
    slo_s = (run_s(SMALL, optimal, steps) + run_s(SMALL, wider, steps)) / 2
    assert degrees([request("r", SMALL, slo_s, steps=steps)], 8) == {"r": wider}


def test_under_pressure_a_degree_is_narrowed_where_that_saves_work_and_keeps_slack() -> None:
    pending = [request(f"r{i}", LARGE, steps=50) for i in range(4)]
    assert set(degrees(pending, 4).values()) == {1}
    # A deadline that degree 1 just meets leaves no slack.
    tight = [request(f"r{i}", LARGE, run_s(LARGE, 1, 50) + 0.01, steps=50) for i in range(4)]
    assert all(degree > 1 for degree in degrees(tight, 4).values())


def test_what_is_not_idle_in_one_node_is_not_waited_for() -> None:
    views = [*workers(1, "EDC", node="a"), *workers(1, "EDC", node="b")]
    (assignment,) = decide(Segments(TIMES), [request("r", LARGE)], views, 0.0)
    assert len(assignment.diffuse) == 1


def test_a_request_goes_on_after_each_segment_until_its_end() -> None:
    engine = StepEngine(Segments(TIMES), workers(2, "EDC"))
    engine.play([request("r", LARGE, steps=50)])
    step_s = step_seconds(LARGE, len(engine.log[0][1].diffuse))
    assert len(engine.log) == pytest.approx(50 * step_s / DispatchOptions().segment_s, abs=1)
    assert [bool(each.decode) for _, each in engine.log] == [False] * (len(engine.log) - 1) + [True]


@given(st.integers(0, 200), st.floats(0.0, 100.0))
def test_segments_are_of_whole_steps_and_the_last_is_not_tiny(left: int, step_s: float) -> None:
    steps = count_segment_steps(left, step_s, 1.0)
    assert min(left, 1) <= steps <= left
    after = left - steps
    assert after == 0 or after * step_s >= 0.4 * steps * step_s
