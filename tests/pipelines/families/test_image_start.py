"""Requests that start from an image, of families that make images from text: the results are those of the stock
image-to-image and inpainting pipelines, wherever the stages run, and E has the VAE only where images are allowed."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import safetensors.torch
import torch

from tests.pipelines.adapters.test_adapters import through_a_wire
from tests.pipelines.models import (
    STARTING,
    STARTING_PIPELINES,
    WITH_MASK,
    decode,
    families,
    family_of,
    final_latents,
    load_stage,
    make_image,
    make_inputs,
    make_mask,
    make_start,
    start,
    stock_result,
)
from tests.pipelines.variants import replace_model
from tridentserve.errors import InvalidRequestError
from tridentserve.models.families import FAMILIES
from tridentserve.models.input_image import encode_png, read_image, shrink_image
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.requests import GenerationInputs, ImageStart
from tridentserve.stages import Stage

Model = Callable[[str], Path]
QUICK = ("sd3-start", "sd3-mask", "flux-mask")
# Models of SDXL whose schedulers keep their place in other ways, draw noise at each step or end otherwise, and one
# whose VAE has statistics.
OF_SDXL = ("sdxl-ancestral", "sdxl-trailing", "sdxl-tcd", "sdxl-lcm", "sdxl-playground")


def load_all(folder: Path) -> DiffusersAdapter:
    adapter = load_adapter(folder, frozenset(Stage), image_start=True)
    assert isinstance(adapter, DiffusersAdapter)
    return adapter


def assert_is_stock(folder: Path, inputs: GenerationInputs) -> None:
    adapter = load_all(folder)
    state = adapter.prepare(adapter.encode(inputs), inputs)
    assert state.num_steps == inputs.computed_steps
    latents = adapter.latents(adapter.step(state, state.num_steps))["latents"]
    assert torch.equal(latents, stock_result(folder, inputs, "latent"))
    assert np.array_equal(adapter.decode({"latents": latents}, inputs), np.stack(stock_result(folder, inputs, "pil")))


@pytest.mark.parametrize("strength", [0.3, 0.9999, 1.0])
@pytest.mark.parametrize("variant", families(*STARTING, quick=QUICK))
def test_every_strength_is_that_of_the_stock_pipeline(model: Model, variant: str, strength: float) -> None:
    inputs = make_inputs(64, 48, 7, variant=variant, num_outputs=2)
    assert inputs.start is not None
    assert_is_stock(model(variant), replace(inputs, start=replace(inputs.start, strength=strength)))


@pytest.mark.families
@pytest.mark.parametrize("strength", [0.6, 1.0])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("variant", OF_SDXL)
def test_other_models_of_sdxl(model: Model, variant: str, has_mask: bool, strength: float) -> None:
    inputs = make_inputs(64, 48, 5, variant=variant, **make_start(has_mask, strength, rounds_down=True))
    assert_is_stock(model(variant), inputs)


@pytest.mark.parametrize("variant", families(*STARTING, quick=QUICK))
def test_nothing_is_lost_between_workers(model: Model, variant: str) -> None:
    """What goes from E to D, from step to step and to C are plain bytes; only E gets the image and the mask."""
    folder, inputs = model(variant), make_inputs(64, 48, 5, variant=variant)
    condition = load_stage(folder, Stage.ENCODE).encode(inputs)
    sent = {name: tensor.contiguous() for name, tensor in condition.items()}
    without, diffuse = inputs.without_images(), load_stage(folder, Stage.DIFFUSE)
    state = diffuse.prepare(safetensors.torch.load(safetensors.torch.save(sent)), without)
    for _ in range(inputs.computed_steps):
        state = diffuse.step(through_a_wire(state))
    latents = through_a_wire(state).tensors["latents"]
    assert torch.equal(latents, stock_result(folder, inputs, "latent"))
    assert np.array_equal(decode(folder, latents, without), np.stack(stock_result(folder, inputs, "pil")))


@pytest.mark.parametrize("variant", families(*(name.split("-")[0] for name in WITH_MASK), quick=("sd3", "flux")))
def test_requests_with_and_without_images_share_passes(model: Model, variant: str) -> None:
    folder, rounds_down = model(variant), variant == "sdxl"
    requests = [
        make_inputs(64, 64, steps=3, seed=1, variant=variant),
        make_inputs(64, 64, steps=5, seed=2, variant=variant, **make_start(False, 0.6, rounds_down)),
        make_inputs(64, 64, steps=4, seed=3, variant=variant, num_outputs=2, **make_start(True, 0.8, rounds_down)),
    ]
    assert {inputs.computed_steps for inputs in requests} <= {3, 4}
    adapter = load_all(folder)
    conditions = adapter.encode_all(requests)
    states = [adapter.prepare(each, inputs) for each, inputs in zip(conditions, requests, strict=True)]
    assert len({adapter.batch_key(state) for state in states}) == 1
    for inputs, state in zip(requests, adapter.advance(states, 3), strict=True):
        last = adapter.step(state, state.num_steps - 3) if state.num_steps > 3 else state
        expected = stock_result(folder, inputs, "latent")
        assert torch.allclose(adapter.latents(last)["latents"], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", families(*WITH_MASK, quick=QUICK))
def test_what_the_mask_leaves_is_the_image(model: Model, variant: str) -> None:
    """Outside the mask all prompts and outputs give the same latents, and inside each its own."""
    folder, inputs = model(variant), make_inputs(64, 64, 4, variant=variant, num_outputs=2)
    before = start(folder, inputs)
    mask = before.tensors["start_mask"].bool().expand(before.tensors["latents"].shape)
    latents, other = final_latents(folder, inputs), final_latents(folder, replace(inputs, prompt="a desert"))
    image = before.tensors["start_image"].expand(latents.shape)
    assert 0.1 < mask.float().mean() < 0.9
    assert torch.equal(latents[~mask], image[~mask])
    assert torch.equal(latents[~mask], other[~mask])
    assert (latents[mask] - other[mask]).abs().max() > 1e-3
    assert (latents - image)[mask].abs().max() > 1e-2


@pytest.mark.parametrize("variant", families(*STARTING, quick=QUICK))
def test_a_large_image_may_come_in_the_size_of_the_output(model: Model, variant: str) -> None:
    inputs = make_inputs(64, 48, 2, variant=variant, image=make_image(0, 301, 220), mask=None)
    start_alone = None if inputs.start is None else replace(inputs.start, has_mask=False)
    inputs = replace(inputs, start=start_alone)
    family = family_of(variant).with_image_start()
    small = encode_png(shrink_image(read_image(inputs.image or b"", 10**6), inputs.shape, family))
    assert read_image(small, 10**6).size == (48, 64)
    encode = load_stage(model(variant), Stage.ENCODE).encode
    expected, found = (encode(each) for each in (inputs, replace(inputs, image=small)))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_a_preview_is_the_prediction_at_the_own_noise_level(model: Model) -> None:
    folder, inputs = model("sd3-start"), make_inputs(64, 64, 6, variant="sd3-start")
    adapter = load_all(folder)
    before = adapter.step(adapter.prepare(adapter.encode(inputs), inputs))
    after = adapter.step(before)
    sigmas = adapter.pipe.scheduler.__class__.from_config(adapter.pipe.scheduler.config)
    sigmas.set_timesteps(6)
    first = 6 - inputs.computed_steps
    earlier, later = sigmas.sigmas[first + 1], sigmas.sigmas[first + 2]
    old, new = before.tensors["latents"], after.tensors["latents"]
    expected = new - later / (later - earlier) * (new - old)
    assert torch.allclose(adapter.sketch(old, after), expected, atol=1e-5)


def test_e_has_the_vae_only_where_images_are_allowed(model: Model) -> None:
    folder, encode = model("sd3"), frozenset({Stage.ENCODE})
    plain, allowed = (load_adapter(folder, encode, image_start=allowed) for allowed in (False, True))
    assert isinstance(plain, DiffusersAdapter)
    assert isinstance(allowed, DiffusersAdapter)
    assert not isinstance(plain.pipe.vae, torch.nn.Module)
    assert isinstance(allowed.pipe.vae, torch.nn.Module)
    text = make_inputs(64, 64)
    for name, tensor in plain.encode(text).items():
        assert torch.equal(tensor, allowed.encode(text)[name])
    with pytest.raises(InvalidRequestError, match=r"image: must be left out.*limits\.max_images: 1"):
        plain.encode(make_inputs(64, 64, **make_start(False)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"start": None}, "strength: there is one exactly where"),
        ({"image": None}, "strength: there is one exactly where"),
        ({"mask": make_mask()}, "mask: there is one exactly where"),
        ({"start": ImageStart(0.6, has_mask=True)}, "mask: there is one exactly where"),
        ({"more_images": (make_image(1),)}, "image: has 2 images, this model takes 1"),
    ],
)
def test_what_does_not_belong_together_is_refused(model: Model, changes: dict[str, Any], says: str) -> None:
    inputs = replace(make_inputs(64, 64, variant="sd3-start"), **changes)
    with pytest.raises(InvalidRequestError, match=says):
        load_stage(model("sd3-start"), Stage.ENCODE).encode(inputs)


def test_a_strength_of_no_step_is_refused(model: Model) -> None:
    inputs = make_inputs(64, 64, 5, variant="sd3-start", start=ImageStart(0.1, rounds_down=True))
    with pytest.raises(InvalidRequestError, match="strength: leaves no step of 5"):
        start(model("sd3-start"), inputs)


def test_a_model_that_was_made_for_inpainting_is_refused(model: Model, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model("sd3"), tmp_path / "inpainting"))
    replace_model(diffusers.SD3Transformer2DModel, in_channels=33)(folder)
    adapter, inputs = load_all(folder), make_inputs(64, 64, **make_start(True))
    with pytest.raises(InvalidRequestError, match="image: the denoising model of this one takes other channels"):
        adapter.prepare(adapter.encode(inputs), inputs)


def test_a_scheduler_that_cannot_start_from_an_image_is_named(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, inputs = load_all(model("sd3")), make_inputs(64, 64, **make_start(False))
    config = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    monkeypatch.setattr(adapter.pipe, "scheduler", diffusers.UniPCMultistepScheduler(**config))
    with pytest.raises(InvalidRequestError, match=r"image: this model's scheduler \(UniPCMultistepScheduler\)"):
        adapter.prepare(adapter.encode(inputs), inputs)


@pytest.mark.parametrize("family", STARTING_PIPELINES)
def test_the_steps_and_the_default_strength_are_those_of_the_stock_pipelines(family: str) -> None:
    rules = FAMILIES[family].image_start
    assert rules is not None
    for has_mask, stock in enumerate(STARTING_PIPELINES[family]):
        default = rules.make_start(None, bool(has_mask))
        assert default.strength == inspect.signature(stock.__call__).parameters["strength"].default
        for steps in (1, 2, 5, 28, 50):
            scheduler = SimpleNamespace(timesteps=torch.arange(steps), order=1)
            pipe = SimpleNamespace(scheduler=scheduler)
            for strength in (0.01, 0.1, 0.29, 0.3, 1 / 3, 0.5, 0.6, 0.7, 0.9, 0.9999, 1.0):
                _, left = stock.get_timesteps(pipe, steps, strength, "cpu")
                assert rules.make_start(strength, bool(has_mask)).count_steps(steps) == left, (steps, strength)
