"""Requests that share forward passes get what they would get alone, whatever step each of them is at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.pipelines.models import ALL, IMAGES, STARTING, families, final_latents, load_stage, make_inputs, start
from tridentserve.pipelines import DenoisingState
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

Model = Callable[[str], Path]


def mixed(variant: str) -> list[GenerationInputs]:
    return [
        make_inputs(64, 64, steps=6, seed=1, guidance_scale=3.0, variant=variant),
        make_inputs(64, 64, steps=3, seed=2, guidance_scale=7.0, num_outputs=2, prompt="a desert", variant=variant),
        make_inputs(64, 64, steps=4, seed=3, guidance_scale=5.0, negative_prompt="", variant=variant),
    ]


@pytest.mark.parametrize("variant", families(*ALL, *STARTING))
def test_members_join_and_leave_at_step_boundaries(model: Model, variant: str) -> None:
    """The second joins after a step of the first, the third after another; each leaves when it is done."""
    folder = model(variant)
    diffuse = load_stage(folder, Stage.DIFFUSE)
    requests = mixed(variant)
    waiting = [start(folder, inputs) for inputs in requests]
    running: list[DenoisingState] = []
    done = {}
    while waiting or running:
        if waiting:
            running.append(waiting.pop(0))
        running = diffuse.advance(running)
        for state in running:
            if state.step == state.num_steps:
                done[state.num_steps] = diffuse.latents(state)["latents"]
        running = [state for state in running if state.step < state.num_steps]
    for inputs in requests:
        alone = final_latents(folder, inputs)
        assert (done[inputs.computed_steps] - alone).abs().max() <= 1e-4


@pytest.mark.parametrize("variant", families(*ALL))
def test_a_batch_is_not_a_mixture(model: Model, variant: str) -> None:
    """The result of a member depends on that member alone, up to far less than requests differ from one another."""
    folder = model(variant)
    diffuse = load_stage(folder, Stage.DIFFUSE)
    one, other = (start(folder, make_inputs(64, 64, seed=seed, variant=variant)) for seed in (1, 2))
    latents = [state.tensors["latents"] for state in diffuse.advance([one, other])]
    assert (latents[0] - latents[1]).abs().max() > 0.1
    assert torch.allclose(latents[1], diffuse.step(other).tensors["latents"], atol=1e-5)


def different(change: str) -> GenerationInputs:
    return make_inputs(64, 96) if change == "size" else make_inputs(64, 64, guidance_scale=1.0)


@pytest.mark.parametrize("change", ["size", "guidance"])
def test_what_cannot_share_a_pass_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """SD3 without guidance has one pass where others have two. This one does not pack."""
    folder = model("sd3")
    diffuse = load_stage(folder, Stage.DIFFUSE)
    monkeypatch.setattr(diffuse, "packs", False)
    one, other = start(folder, make_inputs(64, 64)), start(folder, different(change))
    assert diffuse.batch_key(one) != diffuse.batch_key(other)
    assert diffuse.batch_key(one) == diffuse.batch_key(start(folder, make_inputs(64, 64, seed=9, steps=9)))
    with pytest.raises(ValueError, match="cannot share a forward pass"):
        diffuse.advance([one, other])


@pytest.mark.parametrize("variant", families(*IMAGES))
def test_turned_images_do_not_share_a_pass(model: Model, variant: str) -> None:
    """Packed latents of both have the same shape, but other positions."""
    diffuse = load_stage(model(variant), Stage.DIFFUSE)
    wide, tall = (start(model(variant), make_inputs(*size, variant=variant)) for size in ((64, 96), (96, 64)))
    assert diffuse.batch_key(wide) != diffuse.batch_key(tall)


def test_no_state_is_taken_beyond_its_last_step(model: Model) -> None:
    folder = model("flux")
    diffuse = load_stage(folder, Stage.DIFFUSE)
    short, long = (start(folder, make_inputs(64, 64, steps=steps)) for steps in (2, 5))
    with pytest.raises(ValueError, match="3 more steps"):
        diffuse.advance([long, short], 3)
