"""Requests of different sizes that share packed steps get what they would get alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.pipelines.models import families, family_of, load_stage, make_inputs, start
from tridentserve.models.kernels import Kernels
from tridentserve.models.lora_files import LoraFile, LoraUse
from tridentserve.parallel import sequence_parallel
from tridentserve.pipelines import DenoisingState, kernels, load_adapter
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

Model = Callable[[str], Path]

PACKING = (
    "sd3",
    "sd3-medium",
    "sd3-mask",
    "flux",
    "flux-schnell",
    "flux-mask",
    "wan",
    "wan-2.2",
    "wan-2.2-ti2v",
    "sdxl",
)


def unlike(variant: str) -> list[GenerationInputs]:
    """Requests that differ in all that a packed step allows: size, frames, steps, guidance, number of outputs."""
    frames = {"num_frames": 1} if family_of(variant).frame_multiple else {}
    return [
        make_inputs(64, 96, steps=6, seed=1, guidance_scale=3.0, variant=variant),
        make_inputs(96, 64, steps=3, seed=2, guidance_scale=1.0, prompt="a desert", variant=variant, **frames),
        make_inputs(32, 32, steps=4, seed=3, guidance_scale=5.0, num_outputs=2, negative_prompt="", variant=variant),
    ]


def shorten_text(state: DenoisingState, tokens: int) -> DenoisingState:
    """The same state with a text of so many tokens."""
    tensors = dict(state.tensors)
    tensors["prompt_embeds"] = tensors["prompt_embeds"][:, :tokens].clone()
    if "text_ids" in tensors:
        tensors["text_ids"] = tensors["text_ids"][:tokens].clone()
    return replace(state, tensors=tensors)


@pytest.mark.parametrize("variant", families(*PACKING))
def test_members_of_any_sizes_join_and_leave_at_step_boundaries(model: Model, variant: str) -> None:
    """The first has done a step before the others join; each has a text of another length, but where CLIP alone reads
    it, and leaves when it is done."""
    shorter = 0 if family_of(variant).name == "sdxl" else 3
    diffuse = load_stage(model(variant), Stage.DIFFUSE)
    states = [start(model(variant), inputs) for inputs in unlike(variant)]
    lengths = [state.tensors["prompt_embeds"].shape[1] for state in states]
    starts = [
        shorten_text(state, length - shorter * index)
        for index, (state, length) in enumerate(zip(states, lengths, strict=True))
    ]
    alone = [diffuse.latents(diffuse.step(state, state.num_steps))["latents"] for state in starts]
    running = {0: diffuse.step(starts[0]), 1: starts[1], 2: starts[2]}
    assert len({diffuse.batch_key(state) for state in running.values()}) == 3
    assert len({diffuse.pack_key(state) for state in running.values()}) == 1
    while running:
        running = dict(zip(running, diffuse.advance(list(running.values())), strict=True))
        for index in [index for index, state in running.items() if state.step == state.num_steps]:
            latents = diffuse.latents(running.pop(index))["latents"]
            assert latents.shape == alone[index].shape
            assert (latents - alone[index]).abs().max() <= 1e-4


@pytest.mark.parametrize("variant", families("sd3", "flux", "wan", "sdxl"))
def test_a_packed_step_leaves_no_trace_in_the_steps_of_one_request(model: Model, variant: str) -> None:
    diffuse = load_adapter(model(variant), frozenset({Stage.DIFFUSE}))
    one, other, _ = (start(model(variant), inputs) for inputs in unlike(variant))
    before = diffuse.step(one).tensors["latents"]
    diffuse.advance([one, other])
    assert torch.equal(diffuse.step(one).tensors["latents"], before)


def test_requests_with_a_step_cache_or_a_lora_are_not_packed(model: Model) -> None:
    diffuse = load_stage(model("sd3"), Stage.DIFFUSE)
    assert diffuse.pack_key(start(model("sd3"), make_inputs(quality="fast"))) is None
    exact = start(model("sd3"), make_inputs())
    style = LoraUse(LoraFile("m", "style", Path("style.safetensors"))).to_plain()
    with_lora = replace(exact, values=exact.values | {"loras": [style]})
    assert diffuse.pack_key(exact) is not None
    assert diffuse.pack_key(with_lora) is None
    with pytest.raises(ValueError, match="cannot share a forward pass"):
        diffuse.advance([exact, replace(with_lora, values=with_lora.values | {"size": "32x32"})])


def test_sizes_that_a_u_net_would_cut_into_patches_of_a_pixel_are_not_packed(model: Model) -> None:
    diffuse = load_stage(model("sdxl"), Stage.DIFFUSE)
    assert diffuse.pack_key(start(model("sdxl"), make_inputs(64, 96, variant="sdxl"))) is not None
    assert diffuse.pack_key(start(model("sdxl"), make_inputs(64, 72, variant="sdxl"))) is None


def test_u_nets_of_a_group_do_not_pack(model: Model) -> None:
    diffuse, state = load_stage(model("sdxl"), Stage.DIFFUSE), start(model("sdxl"), make_inputs(variant="sdxl"))
    with sequence_parallel(cast(Any, SimpleNamespace(size=2, rank=0))):
        assert diffuse.pack_key(state) is None
    assert diffuse.pack_key(state) is not None


def test_other_kernels_than_the_default_are_not_packed(model: Model) -> None:
    diffuse = load_adapter(model("sd3"), frozenset({Stage.DIFFUSE}))
    kernels.install(diffuse, Kernels(attention="math"))
    assert diffuse.pack_key(start(model("sd3"), make_inputs())) is None
