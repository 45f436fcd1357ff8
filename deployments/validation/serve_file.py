"""Checks a Serve config file before it is run: `serve run` itself waits endlessly when an application cannot deploy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from deployments.config.app import AppArgs
from deployments.config.base import describe_problems
from deployments.config.live import SCHEDULER, apply_user_config, find_user_config, name_scheduler
from deployments.validation.args import check_args, check_user_config, list_unplanned

BUILDER = "deployments.app:build_app"
DEPLOYMENTS = ("Api", "Videos")
# One Scheduler owns all workers; its bundles are one per worker.
_FIXED_SCHEDULER_OPTIONS = ("autoscaling_config", "placement_group_bundles")
_MAX_PORT = 65535
# Far more than there will be nodes; of more, `check_args` says that they cannot be.
_MOST_CELLS = 10_000


def check_config(file: Path) -> list[str]:
    """One line per problem of a Serve config file, each beginning with the path of the key; empty when it is good."""
    try:
        text = file.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        repeated = list(_find_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader)))
    except OSError as error:
        return [f"{file}: cannot be read ({error.strerror})"]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return [f"{file}: is not valid YAML: {' '.join(str(error).split())}"]
    if not isinstance(content, dict):
        return [f"{file}: must be a mapping with the key `applications`"]
    try:
        config = ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        return [line.removeprefix(".") for line in describe_problems(error, "")]
    problems = [*repeated, *_find_unknown_keys(content)]
    if not 0 < config.http_options.port <= _MAX_PORT:
        problems.append(f"http_options.port: must be 1 to {_MAX_PORT}")
    for index, app in enumerate(config.applications):
        problems += _check_app(app, f"applications[{index}]")
    if not any(is_ours(app) for app in config.applications):
        problems.append(f"applications: none has the import_path {BUILDER}")
    return problems


def list_unchecked(file: Path) -> list[str]:
    """One line for each model of a good config file that `check_config` could not check, or not wholly: it is not in
    the hub's cache here, or is measured at the start."""
    config = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    unchecked = []
    for index, app in enumerate(config.applications):
        if is_ours(app):
            deployments = [one.model_dump(exclude_unset=True) for one in app.deployments]
            args = apply_user_config(AppArgs.model_validate(app.args), find_user_config(deployments))
            unchecked += [
                f"applications[{index}].args: {model.hub_model} is not in the cache of the hub here"
                for model in args.models
                if model.is_unfetched
            ]
            unchecked += [f"applications[{index}].args.{line}" for line in list_unplanned(args)]
    return unchecked


def is_ours(app: ServeApplicationSchema) -> bool:
    """True when an application of a config file is this service; the file may hold others."""
    return app.import_path.replace(":", ".") == BUILDER.replace(":", ".")


def _check_app(app: ServeApplicationSchema, key: str) -> Iterator[str]:
    """The problems of one application; of one that is not this service only the import path is checked."""
    path = app.import_path
    module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    if not _find_module(module):
        yield f"{key}.import_path: there is no module {module!r}; run from the directory that holds it, or install it"
    if is_ours(app):
        live = [(number, one) for number, one in enumerate(app.deployments) if _changes_models(one)]
        yield from check_args(app.args, f"{key}.args", readable=not live)
        for number, deployment in live:
            yield from check_user_config(app.args, deployment.user_config, f"{key}.deployments[{number}].user_config")
        schedulers = [name_scheduler(cell) for cell in range(_count_cells(app.args))]
        for number, deployment in enumerate(app.deployments):
            yield from _check_overrides(deployment, f"{key}.deployments[{number}]", schedulers)


def _changes_models(deployment: DeploymentSchema) -> bool:
    """True when a deployment's `user_config` replaces some of the `args`."""
    return deployment.name == SCHEDULER and "user_config" in deployment.model_fields_set


def _count_cells(args: Mapping[str, Any]) -> int:
    """The number of cells of `args`, which may be wrong in any way."""
    section = args.get("scheduler")
    cells = section.get("cells", 1) if isinstance(section, Mapping) else 1
    return cells if isinstance(cells, int) and 0 < cells <= _MOST_CELLS else 1


def _check_overrides(deployment: DeploymentSchema, key: str, schedulers: Sequence[str]) -> Iterator[str]:
    name, given = deployment.name, deployment.model_fields_set
    if name not in (*DEPLOYMENTS, *schedulers):
        yield f"{key}.name: there is no such deployment; there are {', '.join((*schedulers, *DEPLOYMENTS))}"
    if name in schedulers:
        if "num_replicas" in given and deployment.num_replicas != 1:
            yield f"{key}.num_replicas: {name} has exactly one replica, which owns its workers"
        for option in _FIXED_SCHEDULER_OPTIONS:
            if option in given:
                yield f"{key}.{option}: not for {name}; `cluster` in `args` says how many workers there are"
    if name in schedulers[1:] and "user_config" in given:
        yield f"{key}.user_config: give it to {SCHEDULER}, whose models all cells follow"


def _find_module(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _find_unknown_keys(content: Mapping[str, Any]) -> Iterator[str]:
    """Keys that Serve would pass over in silence: a misspelt option would simply have no effect."""
    yield from _list_unknown(content, ServeDeploySchema, "")
    yield from _list_unknown(content.get("http_options") or {}, HTTPOptionsSchema, "http_options.")
    for index, app in enumerate(content["applications"]):
        yield from _list_unknown(app, ServeApplicationSchema, f"applications[{index}].")
        for number, deployment in enumerate(app.get("deployments") or []):
            yield from _list_unknown(deployment, DeploymentSchema, f"applications[{index}].deployments[{number}].")


def _list_unknown(content: Mapping[str, Any], schema: type[BaseModel], prefix: str) -> Iterator[str]:
    known = set(schema.model_fields) | {field.alias for field in schema.model_fields.values() if field.alias}
    for name in content:
        if name not in known:
            yield f"{prefix}{name}: unknown key; Serve would ignore it"


def _find_repeated_keys(root: yaml.Node | None) -> Iterator[str]:
    """Keys that stand twice in one mapping: YAML readers silently take the last."""
    seen: set[int] = set()  # an alias is its anchor's node once more
    todo = [root] if root is not None else []
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            todo += node.value
        elif isinstance(node, yaml.MappingNode):
            todo += [value for _, value in node.value]
            first: dict[str, yaml.ScalarNode] = {}
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, key) is not key:
                    lines = f"{first[key.value].start_mark.line + 1} and {key.start_mark.line + 1}"
                    yield f"{key.value}: stands twice, in lines {lines}; only the last counts"
