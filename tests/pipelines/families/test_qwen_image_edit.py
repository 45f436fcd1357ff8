"""Qwen-Image-Edit scales every input image to a megapixel, which its text encoder sees as part of the prompt."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.pipelines.models import (
    families,
    final_latents,
    formats_of,
    load_stage,
    make_image,
    make_inputs,
    stock_result,
)
from tridentserve.errors import InvalidRequestError, ModelFolderError
from tridentserve.models.step_cache import StepCache, count_cache_bytes
from tridentserve.pipelines import load_adapter
from tridentserve.stages import Stage

Model = Callable[[str], Path]
BOTH = ("qwen_image_edit", "qwen_image_edit_plus")
ENCODE = frozenset({Stage.ENCODE})


@pytest.mark.slow
@pytest.mark.parametrize("variant", BOTH)
def test_a_megapixel_is_as_exact_as_the_smaller_images_of_the_other_tests(
    model: Model, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    inputs = make_inputs(64, 96, steps=2, guidance_scale=1.0, variant=variant)
    condition = load_stage(model(variant), Stage.ENCODE).encode(inputs)
    assert condition["image_latents"].shape[1] == 1248 // 16 * 832 // 16
    assert torch.equal(final_latents(model(variant), inputs), stock_result(model(variant), inputs, "latent"))


@pytest.mark.families
def test_an_image_of_other_proportions_is_stretched(model: Model) -> None:
    encode = load_stage(model("qwen_image_edit"), Stage.ENCODE).encode
    inputs = make_inputs(64, 64, variant="qwen_image_edit", image=make_image(height=100, width=40))
    buffer = io.BytesIO()
    Image.open(io.BytesIO(inputs.image or b"")).resize((128, 128), Image.Resampling.LANCZOS).save(buffer, "PNG")
    whole, stretched = encode(inputs), encode(replace(inputs, image=buffer.getvalue()))
    assert all(torch.equal(tensor, stretched[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("variant", families(*BOTH))
def test_prompts_see_the_image(model: Model, variant: str) -> None:
    encode = load_stage(model(variant), Stage.ENCODE).encode_all
    requests = [make_inputs(64, 64, variant=variant, image=make_image(seed)) for seed in (0, 1)]
    first, second = (condition["prompt_embeds"] for condition in encode(requests))
    for row in range(2):  # the prompt's and the negative prompt's
        assert (first[row] - second[row]).abs().max() > 1e-2


@pytest.mark.families
@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_the_mark_of_an_image_is_refused_in_prompts(model: Model, field: str) -> None:
    inputs = make_inputs(64, 64, variant="qwen_image_edit")
    change: dict[str, Any] = {field: "a <|image_pad|> here"}
    with pytest.raises(InvalidRequestError, match=f"{field}: must not contain") as raised:
        load_stage(model("qwen_image_edit"), Stage.ENCODE).encode(replace(inputs, **change))
    assert raised.value.param == field


@pytest.mark.families
@pytest.mark.parametrize("file", ["tokenizer.json", "preprocessor_config.json"])
def test_a_processor_without_a_file_is_named(model: Model, tmp_path: Path, file: str) -> None:
    folder = Path(shutil.copytree(model("qwen_image_edit"), tmp_path / "edit"))
    (folder / "processor" / file).unlink()
    with pytest.raises(ModelFolderError, match=r"edit/processor .*copy this folder again"):
        load_adapter(folder, ENCODE)


@pytest.mark.families
def test_step_caches_hold_the_tokens_of_the_input_image(model: Model) -> None:
    inputs = make_inputs(512, 512, quality="fast", variant="qwen_image_edit")
    with_image, without = (
        count_cache_bytes(model(name), [inputs], formats_of(model(name)), StepCache())
        for name in ("qwen_image_edit", "qwen_image")
    )
    assert with_image == without * (1024 + 4096) / 1024
