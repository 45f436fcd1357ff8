"""The cost of packed steps comes from the measured batches, and nothing is promised without them."""

from __future__ import annotations

import pytest

from tests.profiler.packed import compute_step_s, make_cost_model
from tests.profiler.synthetic import SHAPES
from tridentserve.errors import ProfileError
from tridentserve.requests import Shape
from tridentserve.stages import Stage

MIX = [SHAPES[0], SHAPES[0], SHAPES[2]]


def test_what_a_step_costs_once_is_paid_once() -> None:
    assert make_cost_model(0.05).packed_seconds("one", MIX) == pytest.approx(compute_step_s(0.05, MIX), rel=1e-6)


def test_one_request_takes_what_it_takes_alone() -> None:
    times = make_cost_model(0.05)
    assert times.packed_seconds("one", MIX[:1]) == pytest.approx(times.seconds("one", Stage.DIFFUSE, MIX[0]))


@pytest.mark.parametrize(("once_s", "batches"), [(0.0, (1, 2, 4)), (0.05, (1,))])
def test_nothing_is_saved_where_steps_cost_nothing_once_or_nobody_knows(
    once_s: float, batches: tuple[int, ...]
) -> None:
    """Without batches what a step costs once cannot be told from what it costs for each request, such as its text."""
    times = make_cost_model(once_s, batches)
    apart_s = sum(times.seconds("one", Stage.DIFFUSE, shape) for shape in MIX)
    assert times.packed_seconds("one", MIX) == pytest.approx(apart_s, rel=1e-6)


def test_observed_times_count() -> None:
    times, before_s = make_cost_model(0.05), make_cost_model(0.05).packed_seconds("one", MIX)
    for shape in MIX:
        for _ in range(100):
            times.observe("one", Stage.DIFFUSE, shape, 1, 1, 2 * compute_step_s(0.05, [shape]))
    assert times.packed_seconds("one", MIX) == pytest.approx(2 * before_s, rel=1e-2)


def test_sizes_that_were_not_profiled_have_no_cost() -> None:
    with pytest.raises(ProfileError):
        make_cost_model(0.05).packed_seconds("one", [Shape(64, 64), SHAPES[0]])
