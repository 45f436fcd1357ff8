"""Training of the default video model: what it sees of captions is what Wan's pipeline gives it; all stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lib.default_video import pipeline
from lib.default_video.architecture import TEXT_TOKENS, build_vae
from lib.default_video.pipeline import STRIP_PROMPTS, VideoParts, assemble_pipeline, build_parts, shorten_captions
from lib.training.shards import tokenize

from tests.scripts.default_model.whole_run import train_and_judge


def randomize(parts: VideoParts) -> None:
    """Give the outputs that begin at zero values, so that what comes in matters."""
    for part in parts.trained().values():
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter, std=0.1)


def test_short_captions_mean_what_the_pipelines_do(tmp_path: Path) -> None:
    torch.manual_seed(1)
    parts = build_parts(tmp_path)
    randomize(parts)
    torch.save({"step": 0, "averages": {"vae": build_vae().state_dict()}}, tmp_path / "vae.pt")
    torch.save(torch.tensor([0.0, 1.0]), tmp_path / "latent_statistics.pt")
    assembled = assemble_pipeline(tmp_path, parts)
    prompts = [*STRIP_PROMPTS, ""]
    inputs = {
        "hidden_states": torch.randn(len(prompts), 12, 2, 4, 4),
        "timestep": torch.full((len(prompts),), 700.0),
        "return_dict": False,
    }
    with torch.no_grad():
        whole, _ = assembled.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=512)
        expected = parts.transformer(encoder_hidden_states=whole, **inputs)[0]
        embeds = parts.encode(tokenize(parts.tokenizer, prompts, TEXT_TOKENS))
        shorten_captions(parts.transformer)
        actual = parts.transformer(encoder_hidden_states=embeds, **inputs)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    assert (expected[0] - expected[-1]).abs().max() > 0.01


def test_all_stages_make_a_video_model_that_the_judge_can_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiled code is not part of this: that takes a minute."""
    compiled: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda part, **_: compiled.append(type(part).__name__))
    monkeypatch.setattr(pipeline, "STRIP_STEPS", 2)
    model, judged = train_and_judge(tmp_path, monkeypatch, capsys, "--video", trained_with=["--compile"])
    assert compiled == ["WanTransformer3DModel"]
    assert "moving right, left, up, down" in (model / "README.md").read_text(encoding="utf-8")
    assert json.loads((model / "model_index.json").read_text())["_class_name"] == "WanPipeline"
    assert (tmp_path / "denoiser-000002.png").exists()
    figures = judged["side_64"]
    assert set(figures) == {"color", "shape", "direction", "background"}
    assert all(0 <= value <= 1 for value in figures.values())
