"""The predictor of patches whose results are used again: its decisions and its file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tridentserve.errors import ModelFolderError
from tridentserve.models.model_folder import read_json
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.reuse import predictor as module
from tridentserve.pipelines.reuse.predictor import FEATURES, FILE_NAME, load_predictor, write_predictor
from tridentserve.stages import Stage

SHIPPED = Path(module.__file__).parent / "sdxl.json"


@given(
    changes=st.lists(st.floats(0, 10), min_size=2, max_size=8),
    block=st.floats(0, 1),
    step=st.floats(0, 1),
    limit=st.floats(0, 1),
)
def test_a_smaller_change_or_a_larger_limit_reuses_no_less(
    changes: list[float], block: float, step: float, limit: float
) -> None:
    shipped = load_predictor(Path("nowhere"), "sdxl")
    change = torch.tensor([sorted(changes)], dtype=torch.float64)
    steps = torch.full((1, 1), step, dtype=torch.float64)

    def ask(limit: float) -> list[bool]:
        found: list[bool] = shipped.allows(change, block, steps, torch.full_like(steps, limit))[0].tolist()
        return found

    assert ask(limit) == sorted(ask(limit), reverse=True)
    assert sum(ask(limit)) <= sum(ask(2 * limit))
    assert not any(ask(0.0))


def test_the_shipped_one_says_how_it_was_trained() -> None:
    about = read_json(SHIPPED)
    assert about["command"].startswith("python scripts/train_cache_predictor.py")
    assert set(about) == {"weights", "command", "date", "seed", "model", "judged"}
    for row in about["judged"]:
        assert row["right"] > 0.9
        assert row["wrongly_reused"] < 0.35
        assert row["reused"] > 0


def test_a_model_folder_may_have_its_own(tmp_path: Path, model: Callable[[str], Path]) -> None:
    folder = tmp_path / "own"
    shutil.copytree(model("sdxl"), folder)
    weights = [1.0, -2.0, 0.25, 0.0, 3.5]
    write_predictor(folder / FILE_NAME, weights, {"seed": 1})
    assert load_predictor(folder, "sdxl").weights == tuple(weights)
    assert load_predictor(model("sdxl"), "sdxl").weights == tuple(read_json(SHIPPED)["weights"].values())
    loaded: Any = load_adapter(folder, frozenset({Stage.DIFFUSE}))
    assert loaded._predictor.weights == tuple(weights)


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"weights": [1, 2, 3, 4, 5]}', '{"weights": {"constant": 1}}']
    + [json.dumps({"weights": dict.fromkeys(FEATURES, value)}) for value in ("1", True, None)],
)
def test_a_damaged_one_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ModelFolderError, match=FILE_NAME):
        load_predictor(tmp_path, "sdxl")
