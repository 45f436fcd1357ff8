"""The `args:` of a config: what is accepted, and that a message names the key at fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.config.app import AppArgs
from deployments.config.base import describe_problems
from deployments.config.models import ModelArgs
from tridentserve.hub.hub_model import HubModel
from tridentserve.models.cache import CACHE_ENV
from tridentserve.models.number_formats import NumberFormats
from tridentserve.stages import PlacementType

GOOD: dict[str, Any] = {
    "models": [{"name": "m", "tiny": "sd3"}],
    "cluster": {"workers_per_node": 4, "memory_mb": 1024},
    "placement": ["EDC", "EDC", "DC", "E"],
}
TWO_MODELS = [{"name": "a", "tiny": "sd3"}, {"name": "b", "tiny": "flux"}]


def problems(**changes: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        AppArgs.model_validate({**GOOD, **changes})
    return describe_problems(caught.value, "args")


def test_defaults() -> None:
    args = AppArgs.model_validate(GOOD)
    assert (args.dispatch.tick_ms, args.dispatch.solver, args.dispatch.time_limit_ms) == (5, "highs", 100)
    assert (args.handoff.capacity_mb, args.handoff.transport) == (64, "nixl")
    assert args.models[0].slo_scale == 2.5
    assert args.cluster.num_workers == 4


def test_models_without_a_name_are_named_after_their_source() -> None:
    sources: list[dict[str, Any]] = [
        {"path": "black-forest-labs/FLUX.1-schnell"},
        {"path": "another-lab/FLUX.1-schnell"},
        {"path": "/models/my model (copy)/"},
        {"path": ".."},
        {"path": "/"},
        {"shipped": "shapes"},
        {"tiny": "sd3"},
        {"tiny": "sd3", "name": "FLUX.1-schnell-2"},
    ]
    cluster = {"workers_per_node": 1, "memory_mb": 1024}
    args = AppArgs.model_validate({"models": sources, "cluster": cluster})
    names = ["FLUX.1-schnell", "FLUX.1-schnell-3", "my-model-copy", "model", "model-2", "shapes", "tiny-sd3"]
    assert [model.name for model in args.models] == [*names, "FLUX.1-schnell-2"]
    assert AppArgs.model_validate(args.model_dump(exclude_unset=True)) == args


def test_number_formats_are_the_same_however_they_are_written() -> None:
    def read(dtype: Any) -> NumberFormats:
        return ModelArgs.model_validate({"name": "m", "tiny": "wan", "dtype": dtype}).formats

    assert read("bfloat16") == read({"E": "bfloat16", "D": "bfloat16", "C": "bfloat16"})
    assert read({"C": "float32"}) == NumberFormats(decode="float32")
    assert read(None) == read({}) == NumberFormats()


def test_placement_of_one_model_in_short() -> None:
    args = AppArgs.model_validate(GOOD)
    assert args.placement == [{"m": PlacementType(kind)} for kind in ("EDC", "EDC", "DC", "E")]


def test_placement_of_several_models() -> None:
    placement: list[dict[str, str]] = [{"a": "EDC", "b": "D"}, {"b": "E"}, {"b": "C"}, {"a": "E"}]
    args = AppArgs.model_validate({**GOOD, "models": TWO_MODELS, "placement": placement})
    assert args.placement[0] == {"a": PlacementType.EDC, "b": PlacementType.D}
    assert args.placement[3] == {"a": PlacementType.E}


def test_automatic_placement() -> None:
    load = [{"model": "m", "width": 64, "height": 64, "num_inference_steps": 4}]
    args = AppArgs.model_validate({"models": GOOD["models"], "cluster": GOOD["cluster"], "expected_load": load})
    assert args.placement == "auto"
    assert args.expected_load[0].weight == 1


def test_cache_dir_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    assert AppArgs.model_validate(GOOD).cache_dir == tmp_path
    monkeypatch.delenv(CACHE_ENV)
    assert AppArgs.model_validate(GOOD).cache_dir == Path.home() / ".cache" / "tridentserve"


def test_paths_are_absolute_and_know_the_home_directory() -> None:
    args = AppArgs.model_validate({**GOOD, "profiles": ["tiny-cpu", "~/own.csv", "own.csv"], "decision_log": "~/log"})
    assert args.profiles == ["tiny-cpu", str(Path.home() / "own.csv"), str(Path.cwd() / "own.csv")]
    assert args.decision_log == Path.home() / "log"


def test_a_path_is_a_folder_or_an_id_of_the_hub() -> None:
    paths = ["some-lab/some-model", "tests/deployments", "./some-lab/some-model", "~/lab/model", "/lab/model"]
    models = [ModelArgs(name="m", path=path) for path in paths]
    assert [model.path for model in models] == [
        "some-lab/some-model",
        Path.cwd() / "tests" / "deployments",
        Path.cwd() / "some-lab" / "some-model",
        Path.home() / "lab" / "model",
        Path("/lab/model"),
    ]
    assert [model.hub_model for model in models] == [HubModel("some-lab/some-model"), None, None, None, None]


def test_a_revision_says_that_the_hub_is_meant() -> None:
    model = ModelArgs(name="m", path="tests/none", revision="v1")
    assert model.hub_model == HubModel("tests/none", "v1")
    again = ModelArgs.model_validate(model.model_dump(exclude_unset=True))
    assert again == model


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"models": []}, "args.models: "),
        ({"models": [{"name": "m"}]}, "args.models[0].path: give exactly one"),
        ({"models": [{}]}, "args.models[0].path: give exactly one"),
        ({"models": [{"name": None, "tiny": "sd3"}]}, "args.models[0].name: "),
        ({"models": ["sd3"]}, "args.models[0]: "),
        ({"models": {"tiny": "sd3"}}, "args.models: "),
        ({"models": [{"name": "m", "tiny": "sd3", "path": "x"}]}, "args.models[0].path: give exactly one"),
        ({"models": [{"name": "m", "tiny": "sd9"}]}, "args.models[0].tiny: unknown family; there are "),
        ({"models": [{"name": "../m", "tiny": "sd3"}]}, "args.models[0].name: "),
        ({"models": [{"name": "m", "path": 3}]}, "args.models[0].path: name a folder, or a model of the hub"),
        ({"models": [{"name": "m", "path": "/m", "revision": "main"}]}, "args.models[0].revision: only models of the"),
        ({"models": [{"name": "m", "path": "tests/none"}]}, "args.models[0].path: there is a folder 'tests' here, but"),
        ({"models": [{"name": "m", "tiny": "sd3", "slo_scale": 0}]}, "args.models[0].slo_scale: "),
        (
            {"models": [{"name": "m", "tiny": "sd3", "dtype": "half"}]},
            "args.models[0].dtype: 'half' is no number",
        ),
        (
            {"models": [{"name": "m", "tiny": "sd3", "dtype": {"V": "float32"}}]},
            "args.models[0].dtype: 'V' is no",
        ),
        ({"models": [{"name": "m", "tiny": "sd3"}] * 2}, "args.models[1].name: 'm' is used twice"),
        ({"models": [{"name": "m", "path": "~nobody-here/m"}]}, "args.models[0].path: ~nobody-here is no user"),
        ({"model": []}, "args.model: unknown key"),
        ({"cluster": {"workers_per_node": 4, "memory_mb": 0}}, "args.cluster.memory_mb: give a whole number of at"),
        ({"cluster": {"workers_per_node": 4, "memory_mb": "all"}}, "args.cluster.memory_mb: give a whole number of at"),
        (
            {"cluster": {"nodes": 2, "workers_per_node": 2}, "scheduler": {"cells": 2}},
            "args.cluster.memory_mb: give a number: with several cells",
        ),
        ({"profiling": {"budget_s": -1}}, "args.profiling.budget_s: "),
        ({"cluster": {**GOOD["cluster"], "resources": {"GPU": 1}}}, "args.cluster.resources.GPU: the other keys of"),
        ({"cluster": {**GOOD["cluster"], "resources": {"x": 0}}}, "args.cluster.resources.x: "),
        ({"cluster": {**GOOD["cluster"], "workers_per_node": 0}}, "args.cluster.workers_per_node: "),
        ({"cluster": {**GOOD["cluster"], "cpus_per_worker": 0}}, "args.cluster.cpus_per_worker: "),
        ({"cluster": {**GOOD["cluster"], "device": "cuda"}}, "args.cluster.device_name: name the GPU"),
        ({"placement": "EDC"}, "args.placement: give `auto`"),
        ({"placement": ["EDC", "EDC", "EC", "E"]}, "args.placement[2]: unknown placement type; there are EDC, DC"),
        ({"placement": ["EDC", 3, "EDC", "EDC"]}, "args.placement[1]: give a placement type"),
        ({"placement": [{"m": ["D"]}] * 4}, "args.placement[0]: unknown placement type"),
        ({"placement": [{"x": "EDC"}] * 4}, "args.placement[0]: unknown model; there are m"),
        ({"models": TWO_MODELS, "placement": ["EDC"] * 4}, "args.placement[0]: with several models, map each"),
        (
            {"expected_load": [{"model": "x", "width": 64, "height": 64, "num_inference_steps": 4}]},
            "args.expected_load[0].model: unknown model; there are m",
        ),
        ({"dispatch": {"request_weights": {"y": 2.0}}}, "args.dispatch.request_weights.y: unknown model; there are m"),
        ({"dispatch": {"fair_shares": {"m": 0.0}}}, "args.dispatch.fair_shares.m"),
        ({"dispatch": {"max_degree": 3}}, "args.dispatch.max_degree: a degree is a power of two"),
        ({"dispatch": {"max_degree": 8}}, "args.dispatch.max_degree: 8 is more than cluster.workers_per_node (4)"),
        ({"dispatch": {"tick_ms": float("nan")}}, "args.dispatch.tick_ms: "),
        ({"dispatch": {"solver": "glpk"}}, "args.dispatch.solver: "),
        ({"dispatch": {"policy": "b7"}}, "args.dispatch.policy: 'b7' is no policy; use one of default, b1, "),
        ({"dispatch": {"max_batch": 0}}, "args.dispatch.max_batch: "),
        ({"dispatch": {"min_efficiency": 1.1}}, "args.dispatch.min_efficiency: "),
        ({"replan": {"every_s": 3}}, "args.replan.every_s: unknown key"),
        ({"replan": {"settle_s": -1}}, "args.replan.settle_s: "),
        ({"replan": {"trigger_ratio": 0.5}}, "args.replan.trigger_ratio: "),
        ({"models": [{"name": "m", "tiny": "sd3", "window_s": 0}]}, "args.models[0].window_s: "),
        ({"handoff": {"capacity_mb": 1024}}, "args.handoff.capacity_mb: not below cluster.memory_mb (1024)"),
        ({"replicas": {"fetch": "disk"}}, "args.replicas.fetch: "),
        (
            {
                "replicas": {"fetch": "mapped"},
                "cluster": {**GOOD["cluster"], "device": "cuda", "device_name": "NVIDIA L20"},
            },
            "args.replicas.fetch: a GPU cannot use the pages",
        ),
        ({"replicas": {"block_mb": 0}}, "args.replicas.block_mb: "),
        ({"checkpoints": {"every_s": -1}}, "args.checkpoints.every_s: "),
        ({"checkpoints": {"every_steps": 0}}, "args.checkpoints.every_steps: "),
        ({"profiles": []}, "args.profiles: "),
        ({"max_queued_requests": 0}, "args.max_queued_requests: "),
    ],
)
def test_a_message_names_the_key(changes: dict[str, Any], expected: str) -> None:
    found = problems(**changes)
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_all_problems_are_reported_at_once() -> None:
    found = problems(models=[], max_retries=-1, handoff={"x": 1}, placement="auto")
    assert [line.split(":")[0] for line in found] == ["args.models", "args.handoff.x", "args.max_retries"]
