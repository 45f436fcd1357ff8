"""Images that reach E in the size of the output give the same bits as the original images."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.pipelines.models import FROM_IMAGES, families, family_of, load_stage, make_image, make_inputs
from tridentserve.models.families import FAMILIES
from tridentserve.models.input_image import encode_png, read_image, shrink_image
from tridentserve.requests import Shape
from tridentserve.stages import Stage

SIDES = st.integers(1, 12).map(lambda number: 16 * number)
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8))


@settings(max_examples=60)
@given(st.integers(3, 300), st.integers(3, 300), SIDES, SIDES, st.sampled_from(["default", "crop"]))
def test_the_stock_processor_finds_nothing_left_to_do(width: int, height: int, to_w: int, to_h: int, mode: str) -> None:
    processor, source = VaeImageProcessor(vae_scale_factor=16), NOISE.crop((0, 0, width, height))
    family = FAMILIES["hunyuan_video_15_i2v" if mode == "crop" else "flux_kontext"]
    small = shrink_image(source, Shape(to_h, to_w), family)
    expected, found = (
        processor.preprocess(each, height=to_h, width=to_w, resize_mode=mode) for each in (source, small)
    )
    assert torch.equal(expected, found)
    assert small.width * small.height <= width * height


@pytest.mark.parametrize(
    "variant", families(*(name for name in FROM_IMAGES if family_of(name).image_fit), quick=("flux_kontext",))
)
@pytest.mark.parametrize("size", [(300, 200), (120, 400)])
def test_conditions_are_the_same(model: Callable[[str], Path], variant: str, size: tuple[int, int]) -> None:
    content = make_image(height=size[0], width=size[1])
    inputs = make_inputs(64, 96, variant=variant, image=content)
    small = shrink_image(read_image(content, 10**6), inputs.shape, family_of(variant))
    assert small.size == (96, 64)
    sent = encode_png(small)
    assert Image.open(io.BytesIO(sent)).size == (96, 64)
    adapter = load_stage(model(variant), Stage.ENCODE)
    expected, found = adapter.encode(inputs), adapter.encode(replace(inputs, image=sent))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
