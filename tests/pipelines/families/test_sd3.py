"""Stable Diffusion 3 alone takes the number of T5 tokens from its tokenizer, where that makes fewer than the stock
pipeline asks for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipelines.models import load_stage, make_inputs
from tests.pipelines.variants import edit_json
from tridentserve.stages import Stage

Model = Callable[[str], Path]


@pytest.mark.parametrize(("longest", "expected"), [(512, 256), (256, 256), (24, 24)])
def test_the_tokenizer_may_make_fewer_tokens_than_the_stock_pipeline(
    model: Model, tmp_path: Path, longest: int, expected: int
) -> None:
    folder = Path(shutil.copytree(model("sd3"), tmp_path / "copy"))
    edit_json(folder / "tokenizer_3" / "tokenizer_config.json", model_max_length=longest)
    adapter: Any = load_stage(folder, Stage.ENCODE)
    condition = adapter.encode(make_inputs(32, 32, steps=2, variant="sd3", prompt="a red fox", guidance_scale=1.0))
    with torch.no_grad():  # with gradients the kernels round otherwise
        stock, _, _, _ = adapter.pipe.encode_prompt(
            "a red fox", None, None, do_classifier_free_guidance=False, max_sequence_length=expected
        )
    assert condition["prompt_embeds"].shape[1] == 77 + expected
    assert torch.equal(condition["prompt_embeds"], stock)
