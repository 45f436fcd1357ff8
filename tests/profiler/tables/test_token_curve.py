"""The curve between profiled points: exact at them, never falling, never outside them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.tables.curves import TokenCurve

values = st.floats(min_value=1e-4, max_value=1e4)
increasing = st.lists(
    st.tuples(st.integers(1, 100_000), values), min_size=1, max_size=8, unique_by=lambda point: point[0]
).map(lambda points: list(zip(sorted(x for x, _ in points), sorted(y for _, y in points), strict=True)))


@given(increasing)
def test_exact_at_the_points(points: list[tuple[int, float]]) -> None:
    curve = TokenCurve(points)
    assert [curve.interpolate(x) for x, _ in points] == pytest.approx([y for _, y in points])


@given(increasing, st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_monotone_everywhere(points: list[tuple[int, float]], where: list[float]) -> None:
    curve = TokenCurve(points)
    first, last = points[0][0], points[-1][0]
    along = [curve.interpolate(first + share * (last - first)) for share in sorted(where)]
    assert all(left <= right * (1 + 1e-9) for left, right in pairwise(along))
    assert points[0][1] * (1 - 1e-9) <= min(along) <= max(along) <= points[-1][1] * (1 + 1e-9)


def test_a_quadratic_is_found_exactly() -> None:
    def cost(tokens: float) -> float:
        return 3e-5 * tokens + 2e-9 * tokens * tokens

    curve = TokenCurve((n, cost(n)) for n in (256.0, 1024.0, 4096.0, 16384.0))
    for tokens in (300.0, 1000.0, 2000.0, 9000.0):
        assert curve.interpolate(tokens) == pytest.approx(cost(tokens))


def test_points_of_equal_length_are_averaged_and_noise_is_lifted() -> None:
    assert TokenCurve([(10, 1.0), (10, 3.0), (20, 4.0)]).interpolate(10) == 2.0
    noisy = TokenCurve([(10, 2.0), (20, 1.5), (30, 4.0)])
    assert (noisy.interpolate(15), noisy.interpolate(20), noisy.interpolate(30)) == (2.0, 2.0, 4.0)


@pytest.mark.parametrize("tokens", [9.9, 20.1])
def test_nothing_is_extrapolated(tokens: float) -> None:
    curve = TokenCurve([(10, 1.0), (20, 2.0)])
    assert not curve.covers(tokens)
    with pytest.raises(ValueError, match="outside"):
        curve.interpolate(tokens)
