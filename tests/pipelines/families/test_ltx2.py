"""LTX-2 alone makes sound with its videos, and has guidance by more than two passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pipelines.models import (
    call_stock,
    decode,
    final_latents,
    formats_of,
    load_stage,
    make_inputs,
    start,
    stock_pipeline,
    stock_result,
)
from tests.pipelines.variants import edit_json
from tridentserve.errors import InvalidRequestError, ModelFolderError
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.adapters import ltx2
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

Model = Callable[[str], Path]
FAMILY = "ltx2"


@pytest.fixture
def copy(model: Model, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model(FAMILY), tmp_path / "copy"))


def stock_sound(folder: Path, inputs: GenerationInputs, **arguments: Any) -> torch.Tensor:
    """The samples that the stock pipeline makes."""
    heard: list[torch.Tensor] = []
    pipe = stock_pipeline(folder)
    handle = pipe.vocoder.register_forward_hook(lambda module, args, output: heard.append(output))
    try:
        call_stock(pipe, folder, inputs, "np", **arguments)
    finally:
        handle.remove()
    return heard[0]


def assert_same_sound(folder: Path, inputs: GenerationInputs, **arguments: Any) -> None:
    latents = {"latents": final_latents(folder, inputs)}
    sound = load_stage(folder, Stage.DECODE).decode_sound(latents, inputs)
    expected = stock_sound(folder, inputs, **arguments)
    assert sound is not None
    assert sound.sampling_rate == stock_pipeline(folder).vocoder.config.output_sampling_rate
    assert sound.samples.dtype == np.float32
    assert sound.samples.shape == tuple(expected.shape)
    assert len(sound.samples) == inputs.num_outputs
    assert sound.samples.std() > 1e-3
    assert np.array_equal(sound.samples, expected.numpy())


@pytest.mark.parametrize("variant", [FAMILY, pytest.param("ltx2-2.0", marks=pytest.mark.families)])
def test_the_sound_is_that_of_the_stock_pipeline(model: Model, variant: str) -> None:
    assert_same_sound(model(variant), make_inputs(32, 48, steps=2, variant=FAMILY))


@pytest.mark.families
@pytest.mark.parametrize("changes", [{"num_outputs": 2}, {"guidance_scale": 1.0}, {"num_frames": 1}], ids=str)
def test_the_sound_of_other_requests(model: Model, changes: dict[str, Any]) -> None:
    assert_same_sound(model(FAMILY), make_inputs(32, 48, steps=2, variant=FAMILY, **changes))


@pytest.mark.families
def test_a_video_of_other_frames_per_second_has_as_long_a_sound(model: Model) -> None:
    folder, inputs = model(FAMILY), make_inputs(32, 48, steps=2, variant=FAMILY, fps=12.5)
    assert_same_sound(folder, inputs, frame_rate=12.5)
    one, other = (start(folder, each).tensors for each in (inputs, replace(inputs, fps=None)))
    assert (one["audio_coords"].shape[2], other["audio_coords"].shape[2]) == (18, 9)
    diffuse = load_stage(folder, Stage.DIFFUSE)
    assert diffuse.batch_key(start(folder, inputs)) != diffuse.batch_key(start(folder, replace(inputs, fps=None)))
    with pytest.raises(InvalidRequestError, match="1 frames at 120 per second are too short"):
        start(folder, make_inputs(32, 48, variant=FAMILY, fps=120, num_frames=1))


@pytest.mark.families
def test_self_attention_is_left_out_as_by_the_stock_pipeline(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block in which it is by default is one that the tiny model has not."""
    folder, inputs = model(FAMILY), make_inputs(32, 48, steps=2, variant=FAMILY)
    usual = final_latents(folder, inputs)
    monkeypatch.setattr(ltx2, "_PERTURBED_BLOCKS", [1])
    pipe, latents = stock_pipeline(folder), final_latents(folder, inputs)
    assert not torch.equal(latents, usual)
    frames = call_stock(pipe, folder, inputs, "pil", spatio_temporal_guidance_blocks=[1])
    assert np.array_equal(decode(folder, latents, inputs), np.stack(frames))
    assert_same_sound(folder, inputs, spatio_temporal_guidance_blocks=[1])


@pytest.mark.families
def test_a_pass_is_made_only_where_it_differs(model: Model) -> None:
    passes = []
    for variant, scale in ((FAMILY, 3.0), ("ltx2-2.0", 3.0), (FAMILY, 1.0)):
        diffuse: Any = load_stage(model(variant), Stage.DIFFUSE)
        state = start(model(variant), make_inputs(32, 48, variant=FAMILY, guidance_scale=scale))
        passes.append(len(diffuse._build_rows(state.tensors, state.values, 1)["way"]))
    assert passes == [4, 3, 1]


@pytest.mark.families
def test_tiles_of_every_width_can_be_decoded(model: Model) -> None:
    """The VAE cannot decode a tile of a single row or column of latents, as the usual stride would make one here."""
    inputs = make_inputs(32, 112, variant=FAMILY)
    latents = final_latents(model(FAMILY), inputs)
    tiled = load_stage(model(FAMILY), Stage.DECODE).decode({"latents": latents}, inputs, tile=128)
    whole = decode(model(FAMILY), latents, inputs)
    assert tiled.shape == whole.shape
    assert np.abs(tiled.astype(int) - whole.astype(int)).mean() < 5


@pytest.mark.families
def test_a_single_step_is_refused(model: Model) -> None:
    """Its noise level, which is the first and the last one, cannot be both."""
    with pytest.raises(InvalidRequestError, match="this model needs at least 2 steps"):
        start(model(FAMILY), make_inputs(32, 48, steps=1, variant=FAMILY))


@pytest.mark.families
@pytest.mark.parametrize("changes", [{"num_outputs": 2}, {"guidance_scale": 1.0}], ids=str)
def test_other_requests_in_bfloat16(model: Model, changes: dict[str, Any]) -> None:
    """Kernels look at how tensors are stored, which differs from pass to pass."""
    folder, inputs = model(FAMILY), make_inputs(48, 64, steps=2, variant=FAMILY, **changes)
    formats = formats_of(folder, "bfloat16")
    adapter = load_adapter(folder, frozenset(Stage), formats=formats)
    state = adapter.step(adapter.prepare(adapter.encode(inputs), inputs), inputs.num_inference_steps)
    latents = adapter.latents(state)
    assert torch.equal(latents["latents"], stock_result(folder, inputs, "latent", formats))
    frames = stock_result(folder, inputs, "pil", formats)
    assert np.array_equal(adapter.decode(latents, inputs), np.stack(frames))


@pytest.mark.families
def test_sides_of_a_single_latent_are_refused(model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="96x32x9 cannot be made: the sides must be 64 at least"):
        start(model(FAMILY), make_inputs(16, 48, variant=FAMILY))


@pytest.mark.families
def test_models_of_other_kinds_are_refused(copy: Path) -> None:
    edit_json(copy / "vae" / "config.json", decoder_inject_noise=[False, False, True, False])
    with pytest.raises(ModelFolderError, match="the VAE adds noise to what it decodes"):
        load_adapter(copy, frozenset({Stage.DIFFUSE}))
    edit_json(copy / "vae" / "config.json", decoder_inject_noise=False)
    edit_json(copy / "transformer" / "config.json", audio_in_channels=8)
    with pytest.raises(ModelFolderError, match="the tokens of the video have 16 channels, those of the sound 8"):
        load_adapter(copy, frozenset({Stage.ENCODE}))


@pytest.mark.families
def test_version_2_0(model: Model) -> None:
    folder, inputs = model("ltx2-2.0"), make_inputs(32, 48, steps=2, variant=FAMILY)
    latents = final_latents(folder, inputs)
    assert torch.equal(latents, stock_result(folder, inputs, "latent"))
    assert np.array_equal(decode(folder, latents, inputs), np.stack(stock_result(folder, inputs, "pil")))
