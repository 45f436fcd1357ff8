"""Families whose requests start from an image: which images they accept, and the effect of the image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pipelines.models import (
    ALL,
    FROM_IMAGES,
    decode,
    families,
    family_of,
    final_latents,
    load_stage,
    make_image,
    make_inputs,
    model_folder,
    start,
    stock_result,
)
from tests.pipelines.variants import edit_json
from tridentserve.errors import InvalidRequestError, ModelFolderError
from tridentserve.pipelines import load_adapter
from tridentserve.stages import Stage

Model = Callable[[str], Path]
OTHERS = ("cogvideox_i2v-1.0", "wan_i2v-2.2")
QUICK = ("flux_kontext",)
# The families of which all requests have an image, or none does.
DECIDED = tuple(name for name in ALL if family_of(name).needs_image == family_of(name).takes_image)


@pytest.mark.parametrize("variant", families(*FROM_IMAGES, *OTHERS, quick=("flux_kontext", "cogvideox_i2v", "wan_i2v")))
def test_another_image_makes_another_result(model: Model, variant: str) -> None:
    inputs = make_inputs(64, 64, variant=variant)
    before, after = (final_latents(model(variant), replace(inputs, image=make_image(seed))) for seed in (0, 1))
    assert (before - after).abs().max() > 1e-2


@pytest.mark.parametrize("variant", families(*FROM_IMAGES, quick=QUICK))
def test_an_image_of_any_size_costs_the_same(model: Model, variant: str) -> None:
    """Conditions and states have the shapes that the output's size gives, whatever the image's own size and seed."""
    folder = model(variant)
    images = (make_image(), make_image(height=300, width=17), make_image(height=1, width=1))
    states = [start(folder, make_inputs(64, 96, variant=variant, image=image)) for image in images]
    shapes = [{name: tensor.shape for name, tensor in state.tensors.items()} for state in states]
    assert shapes[0] == shapes[1] == shapes[2]
    assert len({load_stage(folder, Stage.DIFFUSE).batch_key(state) for state in states}) == 1


@pytest.mark.parametrize("variant", families(*FROM_IMAGES, quick=QUICK))
def test_requests_with_their_own_images_share_passes(model: Model, variant: str) -> None:
    folder = model(variant)
    requests = [
        make_inputs(64, 64, steps=2, seed=seed, variant=variant, image=make_image(seed), num_outputs=seed)
        for seed in (1, 2)
    ]
    conditions = load_stage(folder, Stage.ENCODE).encode_all(requests)
    diffuse = load_stage(folder, Stage.DIFFUSE)
    states = [diffuse.prepare(each, inputs) for each, inputs in zip(conditions, requests, strict=True)]
    for inputs, state in zip(requests, diffuse.advance(states, 2), strict=True):
        assert torch.allclose(diffuse.latents(state)["latents"], final_latents(folder, inputs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", families(*FROM_IMAGES, quick=QUICK))
def test_only_encode_needs_the_image(model: Model, variant: str) -> None:
    folder, inputs = model(variant), make_inputs(64, 64, steps=2, variant=variant)
    without = replace(inputs, image=None)
    diffuse = load_stage(folder, Stage.DIFFUSE)
    state = diffuse.prepare(load_stage(folder, Stage.ENCODE).encode(inputs), without)
    latents = diffuse.latents(diffuse.step(state, 2))["latents"]
    assert torch.equal(latents, final_latents(folder, inputs))
    assert np.array_equal(decode(folder, latents, without), decode(folder, latents, inputs))


@pytest.mark.parametrize("variant", families(*DECIDED, quick=("sd3", *QUICK)))
def test_an_image_is_given_where_one_is_needed_and_nowhere_else(model: Model, variant: str) -> None:
    takes_image = family_of(variant).takes_image
    wrong = make_inputs(64, 64, variant=variant, image=None if takes_image else make_image())
    with pytest.raises(InvalidRequestError, match="required" if takes_image else "left out") as raised:
        load_stage(model(variant), Stage.ENCODE).encode(wrong)
    assert raised.value.param == "image"


@pytest.mark.families
def test_learned_positions_allow_one_size(model: Model) -> None:
    """CogVideoX 1.0 5B."""
    folder, inputs = model("cogvideox_i2v-learned"), make_inputs(64, 96, variant="cogvideox_i2v", num_outputs=2)
    latents = final_latents(folder, inputs)
    assert torch.equal(latents, stock_result(folder, inputs, "latent"))
    with pytest.raises(InvalidRequestError, match=r"size 64x64x9 cannot be made: .* of 96x64 only"):
        start(folder, make_inputs(64, 64, variant="cogvideox_i2v"))


@pytest.mark.families
def test_a_first_frame_that_is_the_images_own(model: Model) -> None:
    """Wan 2.2 TI2V-5B."""
    folder, inputs = model("wan_i2v-2.2-ti2v"), make_inputs(64, 96, variant="wan_i2v", num_outputs=2)
    latents = final_latents(folder, inputs)
    assert torch.equal(latents, stock_result(folder, inputs, "latent"))
    assert torch.equal(latents[0, :, 0], latents[1, :, 0])
    assert not torch.equal(latents[0, :, 1], latents[1, :, 1])
    assert np.array_equal(decode(folder, latents, inputs), np.stack(stock_result(folder, inputs, "pil")))


@pytest.mark.families
def test_transformers_that_want_what_is_not_there_are_refused(tmp_path: Path) -> None:
    folder = model_folder("wan_i2v", tmp_path)
    edit_json(folder / "model_index.json", image_encoder=[None, None], image_processor=[None, None])
    with pytest.raises(ModelFolderError, match="image_encoder"):
        load_adapter(folder, frozenset({Stage.ENCODE}))
    edit_json(folder / "model_index.json", image_encoder=["transformers", "CLIPVisionModel"])
    with pytest.raises(ModelFolderError, match="'image_encoder' without 'image_processor'"):
        load_adapter(folder, frozenset({Stage.ENCODE}))
    edit_json(folder / "transformer" / "config.json", pos_embed_seq_len=10)
    edit_json(folder / "model_index.json", image_processor=["transformers", "CLIPImageProcessor"])
    with pytest.raises(ModelFolderError, match="last image"):
        load_adapter(folder, frozenset({Stage.DIFFUSE}), weights=False)
