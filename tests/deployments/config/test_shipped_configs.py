"""The configurations that come with the project are good, and place the stages as their comments say."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from deployments.assembly.planning import list_workers, make_placement
from deployments.assembly.profiles import find_profile, make_cost_model
from deployments.config.app import AppArgs
from deployments.validation.args import check_args
from deployments.validation.serve_file import check_config
from tridentserve.models.families import FAMILIES
from tridentserve.stages import Stage

CONFIGS = sorted((Path(__file__).parents[3] / "deployments").glob("*.yaml"))
# Their models are in the hub: what they need to be planned is not known here.
OF_GPUS = sorted((Path(__file__).parents[3] / "deployments" / "gpu").glob("*.yaml"))


def placement_of(path: Path) -> list[str]:
    args = AppArgs.model_validate(yaml.safe_load(path.read_text())["applications"][0]["args"])
    specs = list_workers(args, ["node"] * args.cluster.num_workers)
    times = make_cost_model(args)
    plan = make_placement(args, times, specs)
    return [plan.describe(spec.worker_id) for spec in specs]


@pytest.mark.parametrize("path", [*CONFIGS, *OF_GPUS], ids=lambda path: path.stem)
def test_they_are_good(path: Path) -> None:
    assert check_config(path) == []


def test_the_short_configuration_of_the_documentation_is_good(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "real-models.md").read_text(encoding="utf-8")
    block = page[page.index("    http_options:") : page.index("and three commands:")]
    file = tmp_path / "my-service.yaml"
    file.write_text(dedent(block))
    assert check_config(file) == []


@pytest.mark.parametrize(("name", "models"), [("quickstart", ["moving-shapes", "shapes"]), ("tiny", ["tiny-sd3"])])
def test_services_on_four_workers_have_v0_and_v1(name: str, models: list[str]) -> None:
    kinds = placement_of(next(path for path in CONFIGS if path.stem == name))
    assert kinds == ["+".join(f"{model}:{stages}" for model in models) for stages in ("EDC", "EDC", "DC", "E")]


def test_disaggregated_is_v3() -> None:
    kinds = placement_of(next(path for path in CONFIGS if path.stem == "disaggregated"))
    assert kinds == ["tiny-flux:E", "tiny-flux:D", "tiny-flux:D", "tiny-flux:C"]


def test_two_models_are_on_all_workers_as_both_fit() -> None:
    kinds = placement_of(next(path for path in CONFIGS if path.stem == "two_models"))
    assert kinds == ["tiny-flux:EDC+tiny-sd3:EDC"] * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_of_every_family_works_with_the_shipped_tables(family: str) -> None:
    """Its name alone is given: the check plans its limits without Ray."""
    args = {
        "models": [{"name": "m", "tiny": family}],
        "cluster": {"workers_per_node": 2, "memory_mb": 1024},
        "placement": ["EDC", "EDC"],
    }
    assert check_args(args) == []


def test_a_table_of_ones_own_comes_before_the_stand_in() -> None:
    models = [{"name": "tiny-cogvideox", "tiny": "cogvideox"}, {"name": "m", "tiny": "mochi"}]
    holds = {model["name"]: "EDC" for model in models}
    cluster = {"workers_per_node": 2, "memory_mb": 1024}
    values = {"models": models, "profiles": ["tiny-video-cpu"], "cluster": cluster, "placement": [holds] * 2}
    args = AppArgs.model_validate(values)
    assert [find_profile(model, args) for model in args.models] == ["tiny-cogvideox", "tiny-wan"]
    times = make_cost_model(args)
    assert times.degrees("tiny-cogvideox", Stage.DIFFUSE)[-1] > times.degrees("m", Stage.DIFFUSE)[-1] == 1
