"""The time of steps that take over what earlier ones found, or have further images, is learned."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tridentserve.models.step_cache import EXPECTED_SHARES
from tridentserve.requests import Quality, RequestSpec
from tridentserve.scheduling.estimation.step_shares import StepShares
from tridentserve.testing import make_request


def ask(model: str, quality: Quality, token_ratio: float = 1.0) -> RequestSpec:
    return replace(make_request("r"), model=model, quality=quality, token_ratio=token_ratio)


def expect(shares: StepShares, model: str, quality: Quality) -> float:
    return shares.expect(ask(model, quality)).step_share


@given(share=st.floats(0.05, 3.0), steps=st.integers(1, 50))
def test_a_steady_share_is_learned(share: float, steps: int) -> None:
    shares = StepShares()
    for _ in range(2000 // steps + 1):
        shares.observe(ask("m", "fast"), share, steps)
    assert abs(expect(shares, "m", "fast") - share) <= 0.03 + 1e-3 * share
    assert expect(shares, "n", "fast") == EXPECTED_SHARES["fast"]
    assert expect(shares, "m", "high") == EXPECTED_SHARES["high"]
    assert expect(shares, "m", "exact") == 1.0


def test_steps_with_further_images_take_as_long_as_their_tokens_until_some_were_observed() -> None:
    shares = StepShares()
    assert [shares.expect(ask("m", "exact", ratio)).step_share for ratio in (1.0, 2.0, 3.5)] == [1.0, 2.0, 3.5]
    assert shares.expect(ask("m", "fast", 3.0)).step_share == 3 * EXPECTED_SHARES["fast"]
    for _ in range(40):
        shares.observe(ask("m", "exact", 2.0), 3.0, 50)
    assert shares.expect(ask("m", "exact", 2.0)).step_share == 3.0
    assert shares.expect(ask("m", "exact", 4.0)).step_share == 6.0
    assert shares.expect(ask("m", "exact")).step_share == 1.0
    assert shares.expect(ask("m", "fast", 2.0)).step_share == 2 * EXPECTED_SHARES["fast"]


@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(1, 100))))
def test_no_share_is_zero_or_beyond_measure(observed: list[tuple[float, int]]) -> None:
    shares = StepShares()
    for share, steps in observed:
        shares.observe(ask("m", "high"), share, steps)
        assert 0 < expect(shares, "m", "high") <= 20
