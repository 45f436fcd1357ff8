"""The time and the memory of packed steps on several workers follow from the rings of the requests."""

from __future__ import annotations

from tests.profiler.packed import make_cost_model
from tests.profiler.synthetic import SHAPES
from tridentserve.packing.rings import plan_rings
from tridentserve.scheduling.estimation.plan_estimates import PACKED_PEAK_FACTOR, mixed_seconds, rank_peaks
from tridentserve.stages import Stage

SMALL, MIDDLE, LARGE = SHAPES[:3]


def test_the_worker_with_the_most_to_do_decides_how_long_a_step_takes() -> None:
    times = make_cost_model(0.0)
    members = [(LARGE, 1), (MIDDLE, 1), (SMALL, 1)]
    rings = plan_rings([shape.tokens for shape, _ in members], 2)
    assert rings == [range(2), range(1), range(1, 2)]
    large_s = times.seconds("one", Stage.DIFFUSE, LARGE, 2, 1)
    expected_s = large_s + times.seconds("one", Stage.DIFFUSE, MIDDLE, 1, 1)
    assert mixed_seconds(times, "one", Stage.DIFFUSE, 2, members) == expected_s


def test_each_worker_has_the_memory_of_the_requests_in_whose_rings_it_is() -> None:
    times = make_cost_model(0.0)
    large, middle, small = (
        times.peak_bytes("one", Stage.DIFFUSE, shape, degree) for shape, degree in ((LARGE, 2), (MIDDLE, 1), (SMALL, 1))
    )
    peaks = rank_peaks(times, "one", [Stage.DIFFUSE], 2, [(LARGE, 1), (MIDDLE, 1), (SMALL, 1)])
    assert peaks == (PACKED_PEAK_FACTOR * (large + middle), PACKED_PEAK_FACTOR * (large + small))
