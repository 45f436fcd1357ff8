"""The time of steps that take over what earlier ones found is learned by model and quality."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tridentserve.models.step_cache import EXPECTED_SHARES
from tridentserve.requests import Quality
from tridentserve.scheduling.estimation.step_shares import StepShares
from tridentserve.testing import make_request


def expect(shares: StepShares, model: str, quality: Quality) -> float:
    return shares.expect(replace(make_request("r"), model=model, quality=quality)).step_share


@given(share=st.floats(0.05, 3.0), steps=st.integers(1, 50))
def test_a_steady_share_is_learned(share: float, steps: int) -> None:
    shares = StepShares()
    for _ in range(2000 // steps + 1):
        shares.observe("m", "fast", share, steps)
    assert abs(expect(shares, "m", "fast") - share) <= 0.03 + 1e-3 * share
    assert expect(shares, "n", "fast") == EXPECTED_SHARES["fast"]
    assert expect(shares, "m", "high") == EXPECTED_SHARES["high"]
    assert expect(shares, "m", "exact") == 1.0


@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(1, 100))))
def test_no_share_is_zero_or_beyond_measure(observed: list[tuple[float, int]]) -> None:
    shares = StepShares()
    for share, steps in observed:
        shares.observe("m", "high", share, steps)
        assert 0 < expect(shares, "m", "high") <= 20
