"""docs/configuration.md tells of every key of the `args:`, with its type and default, and of nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from deployments.assembly.planning import assemble_service, worker_specs
from deployments.assembly.profiles import cost_model
from deployments.config.app import AppArgs, ClusterArgs, HandoffArgs, Limits, ModelArgs
from deployments.config.planning import DispatchArgs, LoadArgs, ReplanArgs
from deployments.config.replicas import CheckpointsArgs, ReplicasArgs
from deployments.config.videos import VideosArgs
from dispatch.policies import POLICIES
from tridentserve.models.cache import CACHE_ENV

TEXT = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
SECTIONS: dict[str, type[BaseModel]] = {
    "args": AppArgs,
    "models[]": ModelArgs,
    "models[].limits": Limits,
    "cluster": ClusterArgs,
    "expected_load[]": LoadArgs,
    "dispatch": DispatchArgs,
    "replan": ReplanArgs,
    "handoff": HandoffArgs,
    "replicas": ReplicasArgs,
    "checkpoints": CheckpointsArgs,
    "videos": VideosArgs,
}
TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "boolean"}


def told_type(schema: dict[str, Any]) -> str:
    """A JSON schema in the words of the tables."""
    if "anyOf" in schema:
        return told_type(next(one for one in schema["anyOf"] if one.get("type") != "null"))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema:
        return "mapping"
    if schema["type"] == "array":
        items = told_type(schema["items"])
        return "list of mappings" if items == "mapping" else f"list of {items}"
    return TYPES[schema["type"]]


def told_default(schema: dict[str, Any]) -> str:
    default = schema["default"]
    if default is None:
        return "none"
    if isinstance(default, dict):
        return "see below"
    if isinstance(default, list):
        return f"`[{', '.join(default)}]`"
    return f"`{default if isinstance(default, str) else json.dumps(default).removesuffix('.0')}`"


@pytest.mark.parametrize("section", SECTIONS)
def test_a_table_is_its_model(section: str) -> None:
    table = TEXT.partition(f"\n## `{section}`\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    schema = SECTIONS[section].model_json_schema()
    assert [name for name, *_ in rows] == list(schema["properties"])
    for name, kind, default, _ in rows:
        field = schema["properties"][name]
        assert kind == ("`auto` or list" if name == "placement" else told_type(field)), name
        if name in schema.get("required", ()):
            assert default == "required", name
        else:  # the default of cache_dir comes from the environment
            assert default == (f"`${CACHE_ENV}`" if name == "cache_dir" else told_default(field)), name


def test_every_model_of_the_args_has_a_table() -> None:
    models = {"AppArgs", *AppArgs.model_json_schema()["$defs"]}
    assert models == {model.__name__ for model in SECTIONS.values()}


def follows_the_load(name: str) -> bool:
    """Whether a policy wants its placement replanned."""
    args = AppArgs.model_validate(
        {
            "models": [{"name": "tiny-sd3", "tiny": "sd3"}],
            "cluster": {"workers_per_node": 4, "memory_mb": 1024},
            "expected_load": [{"model": "tiny-sd3", "width": 512, "height": 512, "num_inference_steps": 8}],
            "dispatch": {"policy": name},
        }
    )
    specs, times = worker_specs(args, ["node"] * 4), cost_model(args)
    return assemble_service(args, times, specs).policy.replanner_wanted


def test_the_policies_that_follow_the_load_are_named() -> None:
    (meaning,) = re.findall(r"^\| `enabled` \| boolean \| none \| (.+?) \|$", TEXT, re.MULTILINE)
    named = re.findall(r"`([\w-]+)`", meaning.partition("follows the load")[2])
    assert sorted(named) == sorted(name for name in POLICIES if follows_the_load(name))


def test_every_policy_is_explained_once() -> None:
    table = TEXT.partition("\nPolicies:\n")[2].partition("\n\nAll but")[0]
    named = [name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)]
    assert sorted(named) == sorted(POLICIES)
