"""The training of the predictor of patches whose results are used again."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from lib.steps.reuse_training import Samples, fit, judge, record_run

from tests.pipelines.models import make_inputs, model_folder
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.adapters.sdxl import SDXLAdapter
from tridentserve.pipelines.reuse.patch_pass import install_reuse
from tridentserve.stages import Stage


def draw_samples(seed: int) -> Samples:
    """Patches of stacks that add twice the change that enters the last, and half of it in the first."""
    rng = np.random.default_rng(seed)
    change, place, step = np.exp(rng.uniform(-5, 0, 3000)), rng.integers(0, 5, 3000) / 4, rng.uniform(0, 1, 3000)
    added = change * 4.0 ** (place - 0.5) * np.exp(rng.normal(0, 0.02, 3000))
    return np.stack([change, place, step, added], axis=1)


def test_a_rule_is_found_again() -> None:
    predictor = fit(draw_samples(1), seed=3)
    for limit in (0.02, 0.05, 0.12, 0.4):
        judged = judge(predictor, draw_samples(2), limit)
        assert judged["right"] > 0.97
        assert judged["wrongly_reused"] < 0.05
        assert 0.1 < judged["reused"] < 0.9
    assert fit(draw_samples(1), seed=3) == predictor
    assert fit(draw_samples(1), seed=4) != predictor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder("sdxl", tmp_path)


def test_runs_that_are_recorded_are_exact_and_teach_what_holds_in_others(folder: Path) -> None:
    adapter = cast(SDXLAdapter, load_adapter(folder, frozenset({Stage.ENCODE, Stage.DIFFUSE})))
    install_reuse(adapter.pipe.unet)
    first, again, other = (
        record_run(adapter, make_inputs(128, 128, steps=10, seed=seed, variant="sdxl")) for seed in (1, 1, 2)
    )
    # 4 stacks, a patch of 16 latent pixels in each of two passes, and up to three steps before each of nine.
    assert first.shape == (4 * 2 * (1 + 2 + 3 * 7), 4)
    assert np.array_equal(first, again)
    assert (first >= 0).all()
    assert set(np.unique(first[:, 1])) == {0, 1 / 3, 2 / 3, 1}
    predictor = fit(first, seed=1)
    limit = float(np.median(other[:, 3]))
    judged = judge(predictor, other, limit)
    assert judged["right"] > max(0.8, judged["reused"], 1 - judged["reused"])
