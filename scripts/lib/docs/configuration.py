"""The tables of docs/configuration.md, from the models of the configuration; all prose is the page's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from deployments.config.app import AppArgs, ClusterArgs, HandoffArgs, SchedulerArgs
from deployments.config.models import Limits, ModelArgs, RequestDefaults
from deployments.config.planning import DispatchArgs, LoadArgs, ReplanArgs
from deployments.config.profiling import ProfilingArgs
from deployments.config.replicas import CheckpointsArgs, FaultsArgs, ReplicasArgs
from deployments.config.videos import VideosArgs
from tridentserve.errors import ConfigError
from tridentserve.models.cache import CACHE_ENV
from tridentserve.models.number_formats import FLOAT_FORMATS

# The sections of the page, and the model of each.
SECTIONS: dict[str, type[BaseModel]] = {
    "args": AppArgs,
    "models[]": ModelArgs,
    "models[].limits": Limits,
    "models[].defaults": RequestDefaults,
    "cluster": ClusterArgs,
    "expected_load[]": LoadArgs,
    "profiling": ProfilingArgs,
    "scheduler": SchedulerArgs,
    "dispatch": DispatchArgs,
    "replan": ReplanArgs,
    "handoff": HandoffArgs,
    "replicas": ReplicasArgs,
    "checkpoints": CheckpointsArgs,
    "faults": FaultsArgs,
    "videos": VideosArgs,
}
_HEADER = "| key | type | default | meaning |\n|---|---|---|---|\n"
_TABLE = re.compile(re.escape(_HEADER) + r"(?:\|.*\|\n)*")
_TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "boolean"}
# The facts that a JSON schema cannot state: the short form of one key, and defaults from elsewhere.
_OWN_TYPES = {
    "dtype": f"{' or '.join(f'`{name}`' for name in FLOAT_FORMATS)}, or mapping",
    "placement": "`auto` or list",
    "memory_mb": "integer or `auto`",
}
_OWN_DEFAULTS = {"cache_dir": f"`${CACHE_ENV}`", "name": "after its source"}


def fill_tables(page: str) -> str:
    """The page with the table of each section as the code has it. Raises `ConfigError` for a section without one."""
    for section, model in SECTIONS.items():
        heading = f"\n## `{section}`\n"
        before, found, rest = page.partition(heading)
        inside, next_heading, after = rest.partition("\n## ")
        old = _TABLE.search(inside)
        if not found or old is None:
            raise ConfigError(
                f"docs/configuration.md has no table in a section `{section}`; add the heading and {_HEADER!r}"
            )
        new = inside[: old.start()] + _HEADER + "".join(_format_rows(model)) + inside[old.end() :]
        page = before + found + new + next_heading + after
    return page


def _format_rows(model: type[BaseModel]) -> Iterator[str]:
    schema = model.model_json_schema()
    for name, field in schema["properties"].items():
        kind = _OWN_TYPES.get(name) or _format_type(field)
        default = _OWN_DEFAULTS.get(name) or (
            "required" if name in schema.get("required", ()) else _format_default(field)
        )
        yield f"| `{name}` | {kind} | {default} | {field['description']} |\n"


def _format_type(schema: dict[str, Any]) -> str:
    """A JSON schema in the words of the tables."""
    if "anyOf" in schema:
        return _format_type(next(one for one in schema["anyOf"] if one.get("type") != "null"))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema or schema["type"] == "object":
        return "mapping"
    if schema["type"] == "array":
        items = _format_type(schema["items"])
        return "list of mappings" if items == "mapping" else f"list of {items}"
    return _TYPES[schema["type"]]


def _format_default(schema: dict[str, Any]) -> str:
    default = schema["default"]
    if default is None:
        return "none"
    if isinstance(default, dict):
        return "see below"
    if isinstance(default, list):
        return f"`[{', '.join(default)}]`"
    return f"`{default if isinstance(default, str) else json.dumps(default).removesuffix('.0')}`"
