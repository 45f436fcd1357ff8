"""The sizes of a served model, against all sizes that the limits allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.config import Limits, ModelArgs
from deployments.models import ServedModel, served_models
from tridentserve.errors import CheckpointError
from tridentserve.families import FAMILIES

SIDES = st.integers(16, 300)


@given(SIDES, SIDES, st.integers(256, 90_000), st.integers(1, 2048))
def test_sizes_within_the_limits(min_side: int, max_side: int, max_pixels: int, side: int) -> None:
    limits = Limits(min_side=min_side, max_side=max_side, max_pixels=max_pixels)
    model = ServedModel("m", FAMILIES["sd3"], limits)
    sides = [side for side in range(0, max_side + 1, 16) if side >= min_side]
    allowed = [(width, height) for width in sides for height in sides if width * height <= max_pixels]
    if not allowed:
        assert model.smallest.width > model.largest.width
        return
    most = model.most_pixels
    assert (most.width, most.height) in allowed
    assert most.pixels == max(width * height for width, height in allowed)
    squares = [width for width, height in allowed if width == height]
    assert (model.smallest.width, model.largest.width) == (min(squares), max(squares))
    below = [square for square in squares if square <= side]
    assert model.side_near(side) == max(below, default=min(squares))


def test_a_model_that_makes_videos_is_refused() -> None:
    with pytest.raises(CheckpointError, match="clips: wan models make videos"):
        served_models([ModelArgs(name="clips", tiny="wan")])
