"""Sketches of what is being denoised: predicted latents, and their colours by the map that is fitted to a VAE."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn.functional import adaptive_avg_pool2d

from tests.pipelines.models import ALL, families, load_stage, make_inputs, start
from tridentserve.pipelines import PipelineAdapter
from tridentserve.pipelines.latent_colors import MAX_SIDE, LatentColors, draw_sketch, fit_colors
from tridentserve.pipelines.pixels import round_pixels
from tridentserve.stages import Stage

Model = Callable[[str], Path]
FLOW = ("sd3", "flux", "wan-flow")


def draw(adapter: PipelineAdapter, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([draw_sketch(adapter.count_sketch_channels(), side, generator) for side in (3, 5, 7)])


@pytest.mark.parametrize("variant", families(*ALL, "cogvideox-1.5", "sdxl-playground"))
def test_the_map_predicts_colours_of_latents_that_it_was_not_fitted_to(model: Model, variant: str) -> None:
    adapter = load_stage(model(variant), Stage.DECODE)
    colors, sketch = fit_colors(adapter), draw(adapter, 99)
    wanted = adaptive_avg_pool2d(adapter.decode_sketch(sketch), (16, 16))
    error, spread = (colors.predict(sketch) - wanted).square().mean(), wanted.var((0, 2, 3)).mean()
    assert error < spread
    torch.testing.assert_close(colors.weights, fit_colors(adapter).weights)


@pytest.mark.parametrize("variant", families(*ALL, "cogvideox-1.5", quick=(*FLOW, "cogvideox")))
def test_a_sketch_of_the_last_step_decodes_to_the_result(model: Model, variant: str) -> None:
    folder, inputs = model(variant), make_inputs(64, 96, 2, variant=variant, num_outputs=2, num_frames=1)
    diffuse, decode = load_stage(folder, Stage.DIFFUSE), load_stage(folder, Stage.DECODE)
    state = start(folder, inputs)
    for _ in range(2):
        before, state = state, diffuse.step(state)
        sketch = diffuse.sketch(before.tensors["latents"], state)
        assert sketch.isfinite().all()
    pixels = decode.decode(diffuse.latents(state), inputs)
    if pixels.ndim == 5:
        pixels = pixels[:, 0]
    assert np.abs(round_pixels(decode.decode_sketch(sketch)).astype(int) - pixels).max() <= 1
    assert fit_colors(decode).paint(sketch).shape == (2, *sketch.shape[-2:], 3)


@pytest.mark.parametrize("variant", families("wan", "cogvideox", "cogvideox-1.5", quick=("wan", "cogvideox")))
def test_a_sketch_of_a_video_is_its_middle_frame(model: Model, variant: str) -> None:
    adapter, inputs = load_stage(model(variant), Stage.DIFFUSE), make_inputs(32, 32, 2, variant=variant, num_frames=17)
    state = start(model(variant), inputs)
    state = adapter.step(adapter.step(state))
    latents = state.tensors["latents"]
    frames = latents if variant == "wan" else latents.transpose(1, 2)
    middle = {"wan": 2, "cogvideox": 2, "cogvideox-1.5": 3}[variant]  # of 5; in version 1.5 another one is before them
    assert torch.equal(adapter.sketch(latents, state), frames[:, :, middle].float())


@pytest.mark.parametrize("variant", FLOW)
def test_a_sketch_is_the_clean_image_that_the_transformer_predicts(model: Model, variant: str) -> None:
    folder, inputs = model(variant), make_inputs(32, 32, 4, variant=variant, guidance_scale=1.0)
    adapter = load_stage(folder, Stage.DIFFUSE)
    state, predicted = start(folder, inputs), list[torch.Tensor]()
    handle = cast(Any, adapter).pipe.transformer.register_forward_hook(
        lambda module, args, output: predicted.append(output[0])
    )
    for index in range(4):
        before, state = state, adapter.step(state)
        earlier, noisy = float(before.tensors["scheduler.sigmas"][index]), before.tensors["latents"]
        clean = {"latents": noisy - earlier * predicted[-1]}
        done = type(state)(4, 4, state.tensors | clean, state.values)
        torch.testing.assert_close(
            adapter.sketch(noisy, state), adapter.sketch(clean["latents"], done), atol=1e-4, rtol=1e-4
        )
    handle.remove()


def test_a_sketch_changes_nothing_of_a_state(model: Model) -> None:
    adapter, inputs = load_stage(model("sd3"), Stage.DIFFUSE), make_inputs(32, 32, 2)
    plain = sketched = start(model("sd3"), inputs)
    for _ in range(2):
        plain = adapter.step(plain)
        before, sketched = sketched, adapter.step(sketched)
        adapter.sketch(before.tensors["latents"], sketched)
    assert torch.equal(plain.tensors["latents"], sketched.tensors["latents"])


def test_large_latents_make_small_pictures() -> None:
    colors = LatentColors(torch.zeros(5, 3))
    assert colors.paint(torch.zeros(1, 4, MAX_SIDE, 100)).shape == (1, MAX_SIDE, 100, 3)
    assert colors.paint(torch.zeros(1, 4, 2 * MAX_SIDE, 100)).shape == (1, MAX_SIDE, 50, 3)
