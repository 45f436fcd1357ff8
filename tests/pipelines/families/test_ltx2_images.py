"""LTX-2 with an optional input image, which becomes the first frame: the results are those of
`LTX2ImageToVideoPipeline`, and requests with and without an image are served beside each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pipelines.families.test_ltx2 import assert_same_sound
from tests.pipelines.models import decode, final_latents, load_stage, make_image, make_inputs, start, stock_result
from tests.pipelines.variants import edit_json
from tridentserve.errors import InvalidRequestError
from tridentserve.pipelines import DenoisingState
from tridentserve.stages import Stage

Model = Callable[[str], Path]
VARIANT = "ltx2-image"
pytestmark = pytest.mark.families


def finish(state: DenoisingState, folder: Path) -> torch.Tensor:
    diffuse = load_stage(folder, Stage.DIFFUSE)
    return diffuse.step(state, state.num_steps - state.step).tensors["latents"]


@pytest.mark.parametrize("changes", [{}, {"num_outputs": 2}, {"guidance_scale": 1.0}], ids=str)
def test_the_sound_beside_an_image_is_that_of_the_stock_pipeline(model: Model, changes: dict[str, Any]) -> None:
    assert_same_sound(model(VARIANT), make_inputs(32, 48, steps=2, variant=VARIANT, **changes))


@pytest.mark.parametrize(
    "changes",
    [{"num_frames": 17}, {"num_frames": 1}, {"image": make_image(1, 301, 17)}, {"image": make_image(1, 2, 3)}],
    ids=["frames", "still", "odd", "smallest"],
)
def test_other_requests(model: Model, changes: dict[str, Any]) -> None:
    folder, inputs = model(VARIANT), make_inputs(32, 48, steps=2, variant=VARIANT, **changes)
    latents = final_latents(folder, inputs)
    assert torch.equal(latents, stock_result(folder, inputs, "latent"))
    assert np.array_equal(decode(folder, latents, inputs), np.stack(stock_result(folder, inputs, "pil")))


def test_the_first_frame_stays_what_the_image_is(model: Model) -> None:
    inputs = make_inputs(32, 48, variant=VARIANT, num_outputs=2)
    before = start(model(VARIANT), inputs)
    count = int(before.tensors["given"].sum())
    assert 0 < 2 * count == before.tensors["video_coords"].shape[2]
    first, after = before.tensors["latents"], finish(before, model(VARIANT))
    assert torch.equal(after[:, :count], first[:, :count])
    assert torch.equal(first[0, :count], first[1, :count])
    assert not torch.isclose(after[:, count:], first[:, count:]).any(dim=-1).all()
    other = final_latents(model(VARIANT), replace(inputs, image=make_image(1)))
    assert (other - after)[:, count:].abs().max() > 1e-3


def test_images_have_requests_of_their_own_in_a_pass(model: Model) -> None:
    """Requests with images share one, and so do others; each request gets what it gets alone."""
    folder = model(VARIANT)
    requests = [
        make_inputs(32, 48, steps=2, variant=VARIANT, seed=seed, num_outputs=1 + seed % 2, image=image)
        for seed, image in enumerate((make_image(1), None, make_image(2), None))
    ]
    diffuse, conditions = load_stage(folder, Stage.DIFFUSE), load_stage(folder, Stage.ENCODE).encode_all(requests)
    states = [diffuse.prepare(each, inputs) for each, inputs in zip(conditions, requests, strict=True)]
    keys = [diffuse.batch_key(state) for state in states]
    assert keys[0] == keys[2] != keys[1] == keys[3]
    for indices in ((0, 2), (1, 3)):
        together = diffuse.advance([states[index] for index in indices], 2)
        for index, state in zip(indices, together, strict=True):
            alone = final_latents(folder, requests[index])
            assert torch.allclose(state.tensors["latents"], alone, rtol=0, atol=1e-4)


def test_only_encode_needs_the_image(model: Model) -> None:
    """A state goes on where nothing is known of the image, which costs the same whatever its size."""
    inputs = make_inputs(32, 48, steps=2, variant=VARIANT)
    condition = load_stage(model(VARIANT), Stage.ENCODE).encode(inputs)
    without = replace(inputs, image=None)
    state = load_stage(model(VARIANT), Stage.DIFFUSE).prepare(condition, without)
    assert torch.equal(finish(state, model(VARIANT)), final_latents(model(VARIANT), inputs))
    larger = load_stage(model(VARIANT), Stage.ENCODE).encode(replace(inputs, image=make_image(0, 200, 300)))
    assert {name: tensor.shape for name, tensor in larger.items()} == {
        name: tensor.shape for name, tensor in condition.items()
    }


def test_a_folder_of_the_other_pipeline_is_the_same_model(model: Model, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model(VARIANT), tmp_path / "other"))
    edit_json(folder / "model_index.json", _class_name="LTX2ImageToVideoPipeline")
    for image in (make_image(), None):
        inputs = make_inputs(32, 48, steps=2, variant=VARIANT, image=image)
        assert torch.equal(final_latents(folder, inputs), final_latents(model(VARIANT), inputs))


def test_an_image_that_no_video_can_be_made_of_is_refused(model: Model) -> None:
    inputs = make_inputs(32, 48, variant=VARIANT, image=make_image(0, 1, 9))
    with pytest.raises(InvalidRequestError, match="must have at least 2 pixels on each side"):
        load_stage(model(VARIANT), Stage.ENCODE).encode(inputs)
