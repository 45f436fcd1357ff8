"""D runs in segments of about a second, after which it is decided anew which workers a request has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dispatch import DispatchOptions, IlpDispatcher
from tests.dispatch.cluster import decide, request, worker, workers
from tests.profiler.synthetic import SHAPES, cost_model, step_seconds
from tridentserve.protocols import Assignment, WorkerView
from tridentserve.stages import Stage

SMALL, LARGE = SHAPES[0], SHAPES[2]
TIMES = cost_model()
DISPATCHER = IlpDispatcher(TIMES)
STEP_S = step_seconds(LARGE, 1)
DECODE_S = TIMES.seconds("one", Stage.DECODE, LARGE)


def assign(steps: int = 20, steps_done: int = 0, views: list[WorkerView] | None = None) -> Assignment:
    pending = [request("r", LARGE, steps=steps, steps_done=steps_done)]
    (assignment,) = decide(DISPATCHER, pending, views or workers(1, "EDC"), 0.0)
    return assignment


def test_d_stops_after_about_a_second() -> None:
    found = assign()
    assert found.num_steps == round(1.0 / STEP_S) == 8
    assert (found.encode, found.decode) == (("n0-w0",), ())
    assert found.expected_finish_s == pytest.approx(0.02 + 8 * STEP_S)
    spare_s = 1000 - (0.02 + 20 * STEP_S + DECODE_S)
    assert found.reason.startswith(f"EDC degree 1, {spare_s:.2f} s to spare"), "of the whole request"


def test_c_follows_the_last_segment() -> None:
    assert (assign(steps_done=7).num_steps, assign(steps_done=7).decode) == (8, ())
    last = assign(steps_done=8)
    assert (last.num_steps, last.encode, last.decode) == (None, (), ("n0-w0",))
    assert last.expected_finish_s == pytest.approx(12 * STEP_S + DECODE_S)


def test_nothing_is_cut_that_takes_no_longer_than_a_segment() -> None:
    assert assign(steps=int(1.0 / STEP_S)).num_steps is None
    (short,) = decide(DISPATCHER, [request("r", SMALL)], workers(1, "EDC"), 0.0)
    assert (short.num_steps, short.decode) == (None, ("n0-w0",))


def test_a_segment_has_a_step_however_long_that_is() -> None:
    impatient = IlpDispatcher(TIMES, DispatchOptions(segment_s=STEP_S / 100))
    (found,) = decide(impatient, [request("r", LARGE)], workers(1, "EDC"), 0.0)
    assert found.num_steps == 1
    (last,) = decide(impatient, [request("r", LARGE, steps_done=19)], workers(1, "EDC"), 0.0)
    assert (last.num_steps, last.decode) == (None, ("n0-w0",))


def test_wide_groups_do_more_steps_in_a_segment() -> None:
    wide = assign(steps=100, views=workers(4, "EDC"))
    assert (len(wide.diffuse), wide.num_steps) == (4, round(1.0 / step_seconds(LARGE, 4)))


def test_the_auxiliary_for_c_is_free_while_d_is_not_done() -> None:
    """Only the one whose segment is the last needs it."""
    narrow = IlpDispatcher(TIMES, DispatchOptions(max_degree=1))
    views = [*workers(2, "ED"), worker("c", "C")]
    pending = [request("first", LARGE, 100.0), replace(request("second", LARGE, 200.0), steps_done=18, encoded=True)]
    found = {entry.request_ids[0]: entry.decode for entry in decide(narrow, pending, views, 0.0)}
    assert found == {"first": (), "second": ("c",)}
