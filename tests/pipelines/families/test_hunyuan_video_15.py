"""HunyuanVideo 1.5 alone has an encoder for quoted text, and a guider in the model folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipelines.models import final_latents, load_stage, make_inputs, stock_result
from tests.pipelines.variants import edit_json
from tridentserve.errors import ModelFolderError
from tridentserve.pipelines import load_adapter
from tridentserve.stages import Stage

Model = Callable[[str], Path]
FAMILY = "hunyuan_video_15"
pytestmark = pytest.mark.families


@pytest.fixture
def copy(model: Model, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model(FAMILY), tmp_path / "copy"))


def test_quoted_text_is_read_by_an_encoder_of_its_own(model: Model) -> None:
    inputs = make_inputs(32, 32, steps=2, variant=FAMILY, prompt='a sign that says "open"', negative_prompt="“no”")
    condition = load_stage(model(FAMILY), Stage.ENCODE).encode(inputs)
    # `Text "open". ` and `Text "no". ` have a token for each byte, and one for the end.
    assert condition["prompt_embeds_mask_2"].sum(dim=1).tolist() == [len('Text "no". ') + 1, len('Text "open". ') + 1]
    assert torch.equal(final_latents(model(FAMILY), inputs), stock_result(model(FAMILY), inputs, "latent"))
    other = replace(inputs, prompt='a sign that says "shut"')
    assert not torch.equal(final_latents(model(FAMILY), other), final_latents(model(FAMILY), inputs))


def test_all_text_before_the_prompt_is_cut_off(model: Model) -> None:
    pipe: Any = load_stage(model(FAMILY), Stage.ENCODE)
    tokenizer, message = pipe.pipe.tokenizer, pipe.pipe.system_message
    chat = [{"role": "system", "content": message}, {"role": "user", "content": "PROMPT"}]
    before, _, _ = tokenizer.apply_chat_template(chat, tokenize=False).partition("PROMPT")
    assert len(tokenizer(before)["input_ids"]) == pipe.pipe.prompt_template_encode_start_idx


@pytest.mark.parametrize("changes", [{"guidance_scale": 1.0}, {"enabled": False}], ids=str)
def test_a_distilled_model_makes_one_pass_at_any_scale(copy: Path, changes: dict[str, Any]) -> None:
    edit_json(copy / "guider" / "guider_config.json", **changes)
    inputs = make_inputs(32, 32, steps=2, variant=FAMILY, guidance_scale=4.0)
    unguided = stock_result(copy, replace(inputs, guidance_scale=1.0), "latent")
    assert torch.equal(final_latents(copy, inputs), unguided)


@pytest.mark.parametrize("changes", [{"guidance_rescale": 0.7}, {"stop": 0.5}, {"use_original_formulation": True}])
def test_other_guidance_is_refused(copy: Path, changes: dict[str, Any]) -> None:
    edit_json(copy / "guider" / "guider_config.json", **changes)
    with pytest.raises(ModelFolderError, match=r"guider is a ClassifierFreeGuidance \(\{.*\}\), and only a Classifier"):
        load_adapter(copy, frozenset({Stage.ENCODE}))


def test_a_guider_that_is_missing_is_named(copy: Path) -> None:
    shutil.rmtree(copy / "guider")
    with pytest.raises(ModelFolderError, match="guider is missing although"):
        load_adapter(copy, frozenset({Stage.ENCODE}))
