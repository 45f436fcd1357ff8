"""Training of the default model: a run that was stopped goes on as if it had not been; all stages make a model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from lib.default_model import architecture, pipeline
from lib.default_model.captions import describe
from lib.default_model.scenes import draw_scene
from lib.default_model.vae_training import train_vae
from lib.training.runs import TrainingRun, plan_rate

from tests.scripts.default_model.whole_run import train_and_judge

STEPS = 12


def train(folder: Path, until: int) -> torch.nn.Module:
    """Train a layer, as the stages train theirs, up to a step of `STEPS`. Returns its average."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    state = TrainingRun(folder, "layer", {"layer": layer}, [optimizer])
    for step in state.iterate(until):
        torch.manual_seed(step)
        state.learn(layer(torch.randn(8, 4)).square().mean(), plan_rate(step, STEPS, 0.1, warm_up=3))
        state.average(0.9)
    return state.averages["layer"]


def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", STEPS)
    for until in (0, 1, 5, STEPS):
        resumed = train(tmp_path / "parts", until)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


@pytest.mark.parametrize("decay_share", [0.0, 0.25, 1.0])
def test_the_rate_is_at_its_peak_until_it_falls_to_zero(decay_share: float) -> None:
    rates = [plan_rate(step, 200, 0.1, warm_up=10, decay_share=decay_share) for step in range(201)]
    falls_from = max(10, round(200 * (1 - decay_share)))
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:falls_from] == [0.1] * (falls_from - 10)
    assert rates[falls_from:] == sorted(rates[falls_from:], reverse=True)
    assert rates[200] == 0


def test_every_word_is_one_token_and_captions_fit() -> None:
    clip, t5 = architecture.build_clip_tokenizer(), architecture.build_t5_tokenizer()
    for word in architecture.list_words():
        assert len(clip.tokenize(word)) == len(t5.tokenize(word)) == 1, word
    rng = random.Random(3)
    for _ in range(500):
        caption = describe(draw_scene(rng, 128, 128), rng)
        for tokenizer in (clip, t5):
            assert len(tokenizer(caption, truncation=False).input_ids) <= architecture.TEXT_TOKENS
            assert tokenizer.unk_token_id not in tokenizer(caption, add_special_tokens=False).input_ids


def test_all_stages_make_a_model_that_the_judge_can_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "GRID_STEPS", 2)
    model, judged = train_and_judge(tmp_path, monkeypatch, capsys)
    assert "triangle" in (model / "README.md").read_text(encoding="utf-8")
    assert json.loads((model / "model_index.json").read_text())["_class_name"] == "StableDiffusion3Pipeline"
    assert (tmp_path / "denoiser-000002.png").exists()
    figures = judged["side_64"]
    assert set(figures) >= {"color", "shape", "count", "background"}
    assert all(0 <= value <= 1 for value in figures.values())


def test_a_seed_decides_the_first_weights_of_a_vae(tmp_path: Path) -> None:
    """In all processes: they take the same steps from them."""
    for name in ("once", "again"):
        train_vae(tmp_path / name, seed=3, steps=1, device=torch.device("cpu"))
    once, again = (torch.load(tmp_path / name / "vae.pt", weights_only=True) for name in ("once", "again"))
    for name, value in once["parts"]["vae"].items():
        assert torch.equal(value, again["parts"]["vae"][name]), name
