"""Prompts of several requests in one pass of the text encoders: each condition is that of the request alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.pipelines.models import ALL, families, load_stage, make_inputs
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

Model = Callable[[str], Path]
TOLERANCE = 1e-4


def mixed(variant: str) -> list[GenerationInputs]:
    """Other sizes, long and short prompts, with and without a negative one, one without guidance."""
    return [
        make_inputs(64, 64, variant=variant),
        make_inputs(96, 64, variant=variant, prompt="a desert", negative_prompt=""),
        make_inputs(64, 64, variant=variant, prompt="a long prompt " * 9, negative_prompt="many things " * 4),
        make_inputs(64, 64, variant=variant, prompt="mist", guidance_scale=1.0),
        make_inputs(64, 64, variant=variant, prompt="", negative_prompt=""),
    ]


@pytest.mark.parametrize(
    "variant",
    families(
        *ALL,
        "sd3-without-t5",
        "flux2_klein-distilled",
        "sdxl-lcm",
        "mochi-zeros",
        quick=("sd3", "flux", "wan", "mochi-zeros"),
    ),
)
def test_together_as_alone(model: Model, variant: str) -> None:
    encode, requests = load_stage(model(variant), Stage.ENCODE), mixed(variant)
    together = encode.encode_all(requests)
    alone = [encode.encode(inputs) for inputs in requests]
    assert len(together) == len(requests)
    for one, other in zip(together, alone, strict=True):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert (tensor.shape, tensor.dtype) == (other[name].shape, other[name].dtype)
            assert torch.allclose(tensor, other[name], rtol=0, atol=TOLERANCE), name
    first, second = (condition["prompt_embeds"][-1] for condition in together[:2])
    shared = min(len(first), len(second))  # where the encoder reads as many tokens as a prompt has
    assert (first[:shared] - second[:shared]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("variant", families(*ALL, quick=("sd3",)))
def test_requests_that_agree_share_a_pass(model: Model, variant: str) -> None:
    """Three prompts take as many calls of the text encoders as one prompt."""
    adapter = load_stage(model(variant), Stage.ENCODE)
    calls: list[torch.nn.Module] = []
    encoders = [part for name, part in adapter.pipe.components.items() if name.startswith("text_encoder")]  # type: ignore[attr-defined]
    handles = [part.register_forward_hook(lambda module, *_: calls.append(module)) for part in encoders]
    try:
        adapter.encode(make_inputs(64, 64, variant=variant))
        alone = len(calls)
        adapter.encode_all([make_inputs(64, 64, variant=variant, prompt=prompt) for prompt in ("a", "b c", "d")])
    finally:
        for handle in handles:
            handle.remove()
    assert alone > 0
    assert len(calls) == 2 * alone
