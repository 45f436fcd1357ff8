"""Z-Image alone has guidance at every scale above 0, and prompts with as many tokens as they need in one call."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pipelines.models import decode, final_latents, load_stage, make_inputs, start, stock_result
from tests.pipelines.variants import edit_json
from tridentserve.errors import InvalidRequestError
from tridentserve.pipelines import load_adapter
from tridentserve.stages import Stage

Model = Callable[[str], Path]
pytestmark = pytest.mark.families


@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_a_scale_of_0_is_one_pass_and_all_others_are_two(model: Model, scale: float) -> None:
    """The distilled model is called with 0."""
    folder, inputs = model("z_image"), make_inputs(guidance_scale=scale, num_outputs=2, variant="z_image")
    assert len(start(folder, inputs).tensors["text_tokens"]) == (2 if scale else 1)
    latents = final_latents(folder, inputs)
    assert torch.equal(latents, stock_result(folder, inputs, "latent"))
    assert np.array_equal(decode(folder, latents, inputs), np.stack(stock_result(folder, inputs, "pil")))


@pytest.mark.parametrize("letters", [1, 12, 13, 600])
def test_prompts_of_any_length(model: Model, letters: int) -> None:
    """Such as fill up their last 32 tokens, and such as are cut."""
    inputs = make_inputs(64, 64, prompt="m" * letters, variant="z_image")
    assert torch.equal(final_latents(model("z_image"), inputs), stock_result(model("z_image"), inputs, "latent"))


def test_a_step_with_guidance_and_one_without_share_no_pass(model: Model) -> None:
    diffuse = load_stage(model("z_image"), Stage.DIFFUSE)
    one, other = (
        start(model("z_image"), make_inputs(64, 64, guidance_scale=scale, variant="z_image")) for scale in (0.0, 1.0)
    )
    assert diffuse.batch_key(one) != diffuse.batch_key(other)


def test_sizes_without_positions_are_refused(model: Model, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model("z_image"), tmp_path / "small"))
    edit_json(folder / "transformer" / "config.json", axes_lens=[1024, 4, 6])
    adapter = load_adapter(folder, frozenset({Stage.DIFFUSE}))
    condition = load_stage(model("z_image"), Stage.ENCODE).encode(make_inputs(variant="z_image"))
    for height, width in ((64, 112), (80, 96)):
        with pytest.raises(InvalidRequestError, match=f"size {width}x{height} cannot be made: .* for 96x64 at most"):
            adapter.prepare(condition, make_inputs(height, width, variant="z_image"))
    largest = make_inputs(64, 96, variant="z_image")
    stepped = adapter.step(adapter.prepare(condition, largest), largest.num_inference_steps)
    assert torch.equal(adapter.latents(stepped)["latents"], final_latents(model("z_image"), largest))
