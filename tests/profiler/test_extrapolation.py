"""Sizes that were not measured: the sum that fits those that were, and rows that say what they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler import ProfileRow, ProfileTable
from profiler.extrapolation import add_unmeasured, fit_growth
from tridentserve.requests import Shape
from tridentserve.stages import Stage

SIZES = [16.0, 64.0, 256.0, 1024.0]
COSTS = st.floats(0.01, 10.0)


@given(a=st.sampled_from([0.0, 1.0, 50.0]), b=COSTS, c=st.sampled_from([0.0, 1e-4, 1e-2]))
def test_a_sum_of_costs_is_found_again(a: float, b: float, c: float) -> None:
    def cost(n: float) -> float:
        return a + b * n + c * n * n

    found = fit_growth([(n, cost(n)) for n in SIZES])
    assert found(4096.0) == pytest.approx(cost(4096.0), rel=1e-3)


@given(values=st.lists(COSTS, min_size=2, max_size=4))
def test_nothing_gets_cheaper_with_the_size(values: list[float]) -> None:
    found = fit_growth(list(zip(SIZES, values, strict=False)))
    assert 0 < found(1.0) <= found(100.0) <= found(10_000.0)


def test_one_size_alone_counts_as_a_constant() -> None:
    assert fit_growth([(64.0, 3.0)])(4096.0) == pytest.approx(3.0)


def test_missing_sizes_are_modelled_and_the_others_stay() -> None:
    measured = tuple(
        ProfileRow("m", "cpu", stage, Shape(side, side), 1, 1, side * side / 1e6, side * side, "measured: here")
        for stage in (Stage.DIFFUSE, Stage.DECODE)
        for side in (64, 128)
    )
    table = ProfileTable("m", measured, ())
    (diffuse, decode) = add_unmeasured(table, [Shape(64, 64), Shape(512, 256)]).rows[len(measured) :]
    assert (diffuse.stage, decode.stage) == (Stage.DIFFUSE, Stage.DECODE), "encode has no row to begin with"
    assert (diffuse.model, diffuse.gpu, diffuse.shape) == ("m", "cpu", Shape(512, 256))
    assert diffuse.seconds == pytest.approx(512 * 256 / 1e6)
    assert diffuse.peak_bytes == pytest.approx(512 * 256)
    assert diffuse.source == "modelled: fitted to 2 measured sizes"
    assert add_unmeasured(table, [Shape(64, 64)]) == table
