"""Videos have frames, and families with schedulers and models of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pipelines.models import (
    VIDEOS,
    decode,
    families,
    family_of,
    final_latents,
    load_stage,
    make_inputs,
    start,
    stock_result,
)
from tridentserve.errors import InvalidRequestError
from tridentserve.pipelines import DenoisingState
from tridentserve.requests import Shape
from tridentserve.stages import Stage

Model = Callable[[str], Path]


def as_json(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a state as they are after a handoff."""
    read: dict[str, Any] = json.loads(json.dumps(values))
    return read


@pytest.mark.parametrize("count", [0, 1, 3], ids=["one-frame", "short", "longer"])
@pytest.mark.parametrize("variant", families(*VIDEOS, "cogvideox-1.5", quick=()))
def test_as_many_frames_are_made_as_were_asked_for(model: Model, variant: str, count: int) -> None:
    folder = model(variant)
    num_frames = 1 + count * (family_of(variant).frame_multiple or 0)
    inputs = make_inputs(32, 32, steps=2, variant=variant, num_frames=num_frames)
    latents = final_latents(folder, inputs)
    assert torch.equal(latents, stock_result(folder, inputs, "latent"))
    frames = decode(folder, latents, inputs)
    assert frames.shape == (1, num_frames, inputs.shape.height, inputs.shape.width, 3)
    assert frames.dtype == np.uint8


@pytest.mark.parametrize("num_frames", [0, 2, 8])
@pytest.mark.parametrize("variant", families(*VIDEOS, quick=("wan",)))
def test_numbers_of_frames_that_cannot_be_made_are_refused(model: Model, variant: str, num_frames: int) -> None:
    inputs = make_inputs(variant=variant)
    condition = load_stage(model(variant), Stage.ENCODE).encode(inputs)
    wrong = replace(inputs, shape=replace(inputs.shape, num_frames=num_frames))
    rule = f"{num_frames} frames cannot be made by {variant}; the number must be {family_of(variant).frame_multiple}"
    with pytest.raises(InvalidRequestError, match=rule):
        load_stage(model(variant), Stage.DIFFUSE).prepare(condition, wrong)


def test_an_image_has_one_frame(model: Model) -> None:
    inputs = make_inputs(64, 64)
    condition = load_stage(model("sd3"), Stage.ENCODE).encode(inputs)
    with pytest.raises(InvalidRequestError, match="5 frames cannot be made by sd3; the number must be 1"):
        load_stage(model("sd3"), Stage.DIFFUSE).prepare(condition, replace(inputs, shape=Shape(64, 64, 5)))


@pytest.mark.families
def test_a_schedule_of_one_step_is_refused_by_mochi(model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="mochi needs at least 2 steps"):
        start(model("mochi"), make_inputs(32, 32, steps=1, variant="mochi"))


@pytest.mark.families
def test_requests_on_both_sides_of_the_boundary_share_a_step(model: Model) -> None:
    """Wan 2.2: each of the two goes through the transformer of its own timestep, and so alone."""
    folder = model("wan-2.2")
    diffuse = load_stage(folder, Stage.DIFFUSE)
    inputs = [make_inputs(32, 48, steps=4, seed=seed, variant="wan") for seed in (1, 2)]
    first, second = (start(folder, each) for each in inputs)
    first = diffuse.step(first, 3)
    alone = [diffuse.step(state).tensors["latents"] for state in (first, second)]
    together = [state.tensors["latents"] for state in diffuse.advance([first, second])]
    for one, other in zip(alone, together, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    plain = load_stage(model("wan"), Stage.DIFFUSE).step(first).tensors["latents"]
    assert not torch.allclose(plain, alone[0], atol=1e-3)


@pytest.mark.families
def test_wan_with_a_timestep_for_each_token(model: Model) -> None:
    folder, inputs = model("wan-2.2-ti2v"), make_inputs(64, 96, variant="wan", num_outputs=2)
    latents = final_latents(folder, inputs)
    assert latents.shape == (2, 48, 2, 4, 6)
    assert torch.equal(latents, stock_result(folder, inputs, "latent"))
    assert np.array_equal(decode(folder, latents, inputs), np.stack(stock_result(folder, inputs, "pil")))
    with pytest.raises(InvalidRequestError, match="must be a multiple of 32"):
        start(folder, make_inputs(48, 64, variant="wan"))


@pytest.mark.families
def test_noise_of_a_step_resumes_where_it_stopped(model: Model) -> None:
    """CogVideoX with the DPM scheduler draws at each step: the same state gives the same, another place does not."""
    folder = model("cogvideox")
    diffuse = load_stage(folder, Stage.DIFFUSE)
    state = diffuse.step(start(folder, make_inputs(32, 32, variant="cogvideox")))
    once, again = (diffuse.step(state).tensors for _ in range(2))
    assert torch.equal(once["latents"], again["latents"])
    elsewhere = replace(state, tensors=state.tensors | {"generator": torch.Generator().manual_seed(99).get_state()})
    assert not torch.equal(diffuse.step(elsewhere).tensors["latents"], once["latents"])


FLOW_SHIFTED = ("wan", "wan-flow", "wan_i2v", "hunyuan_video", "hunyuan_video_15", "hunyuan_video_15_i2v")


@pytest.mark.parametrize("variant", families(*FLOW_SHIFTED, quick=("wan", "wan-flow")))
def test_a_flow_shift_makes_the_video_of_a_scheduler_that_is_built_with_it(model: Model, variant: str) -> None:
    folder, diffuse = model(variant), load_stage(model(variant), Stage.DIFFUSE)
    inputs = make_inputs(32, 48, steps=4, variant=variant, flow_shift=9.0)
    state = start(folder, inputs)
    for _ in range(4):  # each step by another scheduler, as after a handoff
        state = diffuse.step(DenoisingState(state.step, state.num_steps, dict(state.tensors), as_json(state.values)))
    latents = diffuse.latents(state)["latents"]
    assert torch.equal(latents, stock_result(folder, inputs, "latent"))
    assert not torch.equal(latents, final_latents(folder, replace(inputs, flow_shift=None)))


@pytest.mark.parametrize("variant", families("wan-2.2", "wan_i2v-2.2", quick=("wan-2.2",)))
def test_the_second_guidance_scale_holds_behind_the_boundary(model: Model, variant: str) -> None:
    folder = model(variant)
    inputs = make_inputs(32, 48, steps=6, variant=variant, guidance_scale_2=2.0)
    latents = final_latents(folder, inputs)
    assert torch.equal(latents, stock_result(folder, inputs, "latent"))
    plain = final_latents(folder, replace(inputs, guidance_scale_2=None))
    assert not torch.equal(latents, plain)
    assert torch.equal(plain, final_latents(folder, replace(inputs, guidance_scale_2=inputs.guidance_scale)))


@pytest.mark.parametrize("variant", ["flux", "sdxl"])
def test_a_flow_shift_is_refused_by_schedulers_without_one(model: Model, variant: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"flow_shift: this model's scheduler \(\w+\) has no fixed shift"):
        start(model(variant), make_inputs(32, 32, variant=variant, flow_shift=3.0))
