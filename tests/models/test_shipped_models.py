"""The models in the package: found by their names, small, described, and loaded as any other model folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from deployments.config.models import ModelArgs
from deployments.models.served import build_served_model
from profiler import load_tables
from tridentserve.errors import ConfigError
from tridentserve.models.model_folder import find_shipped_model, list_shipped_models

MOST_BYTES = 40 * 10**6


def test_all_are_small_together() -> None:
    files = [path for name in list_shipped_models() for path in find_shipped_model(name).rglob("*") if path.is_file()]
    assert 10**6 < sum(path.stat().st_size for path in files) < MOST_BYTES


def test_there_is_one_of_images_and_one_of_videos() -> None:
    families = {name: build_served_model(ModelArgs(name="m", shipped=name)).family for name in list_shipped_models()}
    assert {name: family.name for name, family in families.items()} == {"shapes": "sd3", "moving-shapes": "wan"}


@pytest.mark.parametrize("name", list_shipped_models())
def test_each_has_a_card_and_a_profile(name: str) -> None:
    folder = find_shipped_model(name)
    history = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    assert history["steps"] > 0
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{history['steps']:,} steps" in card
    runs = [int(steps.replace(",", "")) for steps in re.findall(r"^\| ([\d,]+) \|", card, re.MULTILINE)]
    assert sum(runs) == history["steps"]
    rows = [row for table in load_tables([f"{name}-cpu"]) for row in table.rows]
    assert {row.model for row in rows} == {name}


def test_unknown_names_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no model 'cats' is shipped with TridentServe; use one of .*shapes"):
        find_shipped_model("cats")
    with pytest.raises(ValidationError, match=r"no such model is shipped; there are .*shapes"):
        ModelArgs(name="m", shipped="cats")


@pytest.mark.parametrize("sources", [{"shipped": "shapes", "tiny": "sd3"}, {"shipped": "shapes", "path": "/models"}])
def test_a_model_has_one_source(sources: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="exactly one of `path`"):
        ModelArgs.model_validate({"name": "m", **sources})


def test_a_folder_without_an_index_is_no_model() -> None:
    assert all(Path(find_shipped_model(name), "model_index.json").is_file() for name in list_shipped_models())
