"""FLUX.1 Fill paints the masked part of an image: the mask has an effect, and is there exactly where it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pipelines.models import decode, final_latents, load_stage, make_inputs, make_mask, stock_result
from tridentserve.errors import InvalidRequestError
from tridentserve.stages import Stage

Model = Callable[[str], Path]
pytestmark = pytest.mark.families


def test_another_mask_makes_another_result(model: Model) -> None:
    folder, inputs = model("flux_fill"), make_inputs(64, 64, variant="flux_fill")
    other = replace(inputs, mask=make_mask(17, 300))  # E scales a mask of any size
    before, after = final_latents(folder, inputs), final_latents(folder, other)
    assert (before - after).abs().max() > 1e-2
    assert torch.equal(after, stock_result(folder, other, "latent"))
    assert np.array_equal(decode(folder, after, other), np.stack(stock_result(folder, other, "pil")))


@pytest.mark.parametrize(
    ("variant", "says"), [("flux_fill", "mask: is required"), ("flux_kontext", "mask: must be left")]
)
def test_a_mask_is_given_where_one_is_needed_and_nowhere_else(model: Model, variant: str, says: str) -> None:
    wrong = make_inputs(64, 64, variant=variant, mask=None if variant == "flux_fill" else make_mask())
    with pytest.raises(InvalidRequestError, match=says) as raised:
        load_stage(model(variant), Stage.ENCODE).encode(wrong)
    assert raised.value.param == "mask"
