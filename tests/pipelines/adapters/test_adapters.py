"""The adapters give what the stock pipelines give, bit by bit, with E, D and C in three separate adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.pipelines.models import (
    ALL,
    QUICK,
    STARTING,
    VARIANTS,
    WITH_IMAGES,
    WITH_ONE_IMAGE,
    decode,
    families,
    family_of,
    final_latents,
    formats_of,
    load_stage,
    make_inputs,
    start,
    stock_result,
)
from tridentserve.errors import InvalidRequestError, ModelFolderError
from tridentserve.models.model_folder import detect_family
from tridentserve.pipelines import DenoisingState, load_adapter
from tridentserve.stages import Stage

Model = Callable[[str], Path]
# Their schedulers keep predictions of earlier steps, or draw noise at each step.
WITH_HISTORY = ("sd3-stochastic", "pixart_sigma-sde", "pixart_sigma-unipc", "sdxl-ancestral", "sdxl-tcd", "sdxl-lcm")
QUICK_VARIANTS = (
    *QUICK,
    "sd3-start",
    "sd3-mask",
    "flux-start",
    "flux-mask",
    "sd3-medium",
    "sd3-without-t5",
    "sd3-shifting",
    "flux-schnell",
    "flux_kontext",
    "sdxl-tcd",
)


@pytest.mark.parametrize("variant", families(*VARIANTS, quick=QUICK_VARIANTS))
@pytest.mark.parametrize(
    "changes",
    [
        {"height": 64, "width": 96, "steps": 2},
        {"height": 80, "width": 48, "steps": 5, "num_outputs": 2, "seed": 11},
        {"steps": 2, "guidance_scale": 1.0, "num_outputs": 2, "prompt": "Ünïcode 猫 \N{CAT FACE} <pad> </s>"},
    ],
    ids=["wide", "tall-two-outputs", "unguided"],
)
def test_result_is_that_of_the_stock_pipeline(model: Model, variant: str, changes: dict[str, Any]) -> None:
    folder, inputs = model(variant), make_inputs(**changes, variant=variant)
    latents = final_latents(folder, inputs)
    assert torch.isfinite(latents).all()
    assert torch.equal(latents, stock_result(folder, inputs, "latent"))
    pixels = decode(folder, latents, inputs)
    frames = () if family_of(variant).frame_multiple is None else (inputs.shape.num_frames,)
    assert pixels.shape == (inputs.num_outputs, *frames, inputs.shape.height, inputs.shape.width, 3)
    assert np.array_equal(pixels, np.stack(stock_result(folder, inputs, "pil")))


@pytest.mark.parametrize("variant", families(*ALL, *WITH_IMAGES, *WITH_ONE_IMAGE, *STARTING))
def test_result_is_that_of_the_stock_pipeline_in_bfloat16(model: Model, variant: str) -> None:
    folder, inputs = model(variant), make_inputs(64, 64, variant=variant)
    formats = formats_of(folder, "bfloat16")
    adapter = load_adapter(folder, frozenset(Stage), formats=formats, image_start=variant in STARTING)
    state = adapter.step(adapter.prepare(adapter.encode(inputs), inputs), inputs.computed_steps)
    latents = adapter.latents(state)["latents"]
    expected = stock_result(folder, inputs, "latent", formats)
    # Wan, Z-Image and LTX-2 denoise in float32 what their transformers take in bfloat16.
    in_float32 = variant.startswith(("wan", "z_image", "ltx2"))
    assert latents.dtype == expected.dtype == (torch.float32 if in_float32 else torch.bfloat16)
    assert torch.equal(latents, expected)


@pytest.mark.parametrize("variant", families(*ALL))
@pytest.mark.parametrize(
    "change", [{"prompt": "a desert"}, {"seed": 8}, {"num_inference_steps": 4}, {"guidance_scale": 9.0}], ids=str
)
def test_what_is_asked_for_has_an_effect(model: Model, variant: str, change: dict[str, Any]) -> None:
    inputs = make_inputs(64, 64, steps=3, variant=variant)
    before, after = (final_latents(model(variant), wanted) for wanted in (inputs, replace(inputs, **change)))
    assert (before - after).abs().max() > 1e-3


@pytest.mark.parametrize("variant", families(*ALL))
def test_negative_prompt_has_an_effect_where_there_is_guidance_by_two_passes(model: Model, variant: str) -> None:
    inputs = make_inputs(64, 64, variant=variant)
    other = replace(inputs, negative_prompt="people, animals")
    same = torch.equal(final_latents(model(variant), inputs), final_latents(model(variant), other))
    assert same != family_of(variant).negative_prompt


@pytest.mark.parametrize("variant", families(*ALL))
def test_outputs_of_one_request_differ(model: Model, variant: str) -> None:
    first, second = final_latents(model(variant), make_inputs(64, 64, num_outputs=2, variant=variant))
    assert (first - second).abs().max() > 0.1


@pytest.mark.parametrize("variant", families(*ALL))
def test_the_condition_is_sent_once_for_all_outputs(model: Model, variant: str) -> None:
    encode = load_stage(model(variant), Stage.ENCODE).encode
    one, four = (encode(make_inputs(num_outputs=count, variant=variant)) for count in (1, 4))
    assert {name: tensor.shape for name, tensor in one.items()} == {name: tensor.shape for name, tensor in four.items()}


@pytest.mark.parametrize(
    "variant",
    families(
        *ALL, *WITH_HISTORY, *WITH_ONE_IMAGE, *STARTING, quick=(*QUICK, "sd3-mask", "cogvideox", "pixart_sigma-sde")
    ),
)
def test_a_request_stopped_after_any_step_resumes_in_a_fresh_adapter(model: Model, variant: str) -> None:
    folder, inputs = model(variant), make_inputs(64, 64, steps=5, num_outputs=2, variant=variant)
    diffuse = load_stage(folder, Stage.DIFFUSE)
    expected = final_latents(folder, inputs)
    state = start(folder, inputs)
    for steps_done in range(state.num_steps):
        fresh = load_adapter(folder, frozenset({Stage.DIFFUSE}))
        moved = through_a_wire(state)
        result = fresh.step(moved, state.num_steps - steps_done)
        assert torch.equal(fresh.latents(result)["latents"], expected), f"stopped after {steps_done} steps"
        state = diffuse.step(state)
        assert state.step == steps_done + 1


def through_a_wire(state: DenoisingState) -> DenoisingState:
    """The state after a trip as bytes and JSON, which is all that a handoff can carry."""
    tensors = {name: tensor.clone().contiguous() for name, tensor in state.tensors.items()}
    return DenoisingState(
        state.step,
        state.num_steps,
        safetensors.torch.load(safetensors.torch.save(tensors)),
        json.loads(json.dumps(state.values)),
    )


def test_a_step_leaves_the_state_it_was_given_as_it_was(model: Model) -> None:
    state = start(model("sd3"), make_inputs(64, 64))
    before = through_a_wire(state)
    load_stage(model("sd3"), Stage.DIFFUSE).step(state)
    assert state.step == before.step
    assert state.values == before.values
    assert all(torch.equal(tensor, before.tensors[name]) for name, tensor in state.tensors.items())


def test_requests_may_take_turns_on_one_adapter(model: Model) -> None:
    folder, diffuse = model("sd3"), load_stage(model("sd3"), Stage.DIFFUSE)
    requests = [make_inputs(64, 64, steps=3), make_inputs(48, 80, steps=3, seed=1)]
    states = [start(folder, inputs) for inputs in requests]
    for _ in range(3):
        states = [diffuse.step(state) for state in states]
    for inputs, state in zip(requests, states, strict=True):
        assert torch.equal(diffuse.latents(state)["latents"], final_latents(folder, inputs))


def test_stages_that_were_not_loaded_say_so(model: Model) -> None:
    folder, inputs = model("sd3"), make_inputs()
    condition = load_stage(folder, Stage.ENCODE).encode(inputs)
    with pytest.raises(ModelFolderError, match=r"decode stage of this sd3 model was not loaded \(loaded: encode\)"):
        load_stage(folder, Stage.ENCODE).decode({}, inputs)
    with pytest.raises(ModelFolderError, match="diffuse stage"):
        load_stage(folder, Stage.DECODE).prepare(condition, inputs)
    with pytest.raises(ModelFolderError, match="encode stage"):
        load_stage(folder, Stage.DIFFUSE).encode(inputs)


def test_too_many_steps_and_early_latents_are_refused(model: Model) -> None:
    diffuse = load_stage(model("flux"), Stage.DIFFUSE)
    state = diffuse.step(start(model("flux"), make_inputs(steps=2)))
    with pytest.raises(ValueError, match="2 more steps asked for, but 1 of 2 are done"):
        diffuse.step(state, 2)
    with pytest.raises(ValueError, match="not ready: 1 of 2 steps"):
        diffuse.latents(state)


def test_more_steps_than_the_scheduler_makes_are_refused(model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="scheduler cannot make 51 steps"):
        start(model("sdxl-tcd"), make_inputs(steps=51, variant="sdxl"))


@pytest.mark.parametrize("variant", families(*ALL, "wan-2.2-ti2v", quick=("sd3", "wan-2.2-ti2v")))
def test_sizes_that_cannot_be_made_are_refused(model: Model, variant: str) -> None:
    multiple = detect_family(model(variant)).size_multiple
    inputs = make_inputs(64, 64, variant=variant)
    inputs = replace(inputs, shape=replace(inputs.shape, height=64 + multiple // 2))
    with pytest.raises(InvalidRequestError, match=f"{inputs.shape} must be a multiple of {multiple} in both"):
        start(model(variant), inputs)
