"""Checks a Serve config file before it is run: `serve run` itself waits for ever when an application cannot deploy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from deployments.config import AppArgs, describe_problems
from deployments.models import ServedModel, family_of
from deployments.planning import plan_placement, worker_specs
from deployments.profiles import cost_model
from profiler import CostModel
from tridentserve.errors import CheckpointError, PlacementError, ProfileError
from tridentserve.requests import Shape
from tridentserve.stages import Stage

BUILDER = "deployments.app:build_app"
DEPLOYMENTS = ("Api", "Scheduler")


def config_problems(file: Path) -> list[str]:
    """One line per problem of a Serve config file, each beginning with the path of the key; empty when it is good."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
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
    problems = list(_unknown_keys(content))
    for index, app in enumerate(config.applications):
        problems += _app_problems(app, f"applications[{index}]")
    if not any(_is_ours(app) for app in config.applications):
        problems.append(f"applications: none has the import_path {BUILDER}")
    return problems


def _is_ours(app: ServeApplicationSchema) -> bool:
    return app.import_path.replace(":", ".") == BUILDER.replace(":", ".")


def _app_problems(app: ServeApplicationSchema, key: str) -> Iterator[str]:
    """Of another application only the import path is looked at."""
    path = app.import_path
    module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    if not _module_exists(module):
        yield f"{key}.import_path: there is no module {module!r}; run from the folder that holds it, or install it"
    if _is_ours(app):
        yield from args_problems(app.args, f"{key}.args")
        for number, deployment in enumerate(app.deployments):
            if deployment.name not in DEPLOYMENTS:
                known = ", ".join(DEPLOYMENTS)
                yield f"{key}.deployments[{number}].name: there is no such deployment; there are {known}"


def _module_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def args_problems(args: Mapping[str, Any], key: str = "args") -> list[str]:
    """The problems of the `args:` of one application, model folders and profile tables included."""
    try:
        parsed = AppArgs.model_validate(args)
    except ValidationError as error:
        return describe_problems(error, key)
    problems: list[str] = []
    models: dict[str, ServedModel] = {}
    for index, model in enumerate(parsed.models):
        try:
            models[model.name] = ServedModel(model.name, family_of(model), model.limits)
        except CheckpointError as error:
            problems.append(f"{key}.models[{index}].path: {error}")
    try:
        times = cost_model(parsed)
    except ProfileError as error:
        return [*problems, f"{key}.{error}"]
    problems += [f"{key}.{line}" for line in _uncovered(parsed, models, times)]
    if not problems:
        # Nodes get their names when the application starts; for planning only their number counts.
        nodes = [
            f"node-{index}" for index in range(parsed.cluster.nodes) for _ in range(parsed.cluster.workers_per_node)
        ]
        try:
            plan_placement(parsed, times, worker_specs(parsed, nodes))
        except (PlacementError, ProfileError) as error:
            problems.append(f"{key}.placement: {error}")
    return problems


def _uncovered(args: AppArgs, models: Mapping[str, ServedModel], times: CostModel) -> Iterator[str]:
    """Sizes that may be asked for, or are expected, but have no profile: their requests could never be planned."""
    for index, model in enumerate(args.models):
        if model.name in models:
            for limit, shape in (("min", models[model.name].smallest), ("max", models[model.name].largest)):
                if problem := _not_profiled(times, model.name, shape):
                    yield f"models[{index}].limits.{limit}_side: {problem}"
    for index, load in enumerate(args.expected_load):
        if problem := _not_profiled(times, load.model, Shape(load.height, load.width)):
            yield f"expected_load[{index}]: {problem}"


def _not_profiled(times: CostModel, model: str, shape: Shape) -> str | None:
    try:
        for stage in Stage:
            times.seconds(model, stage, shape)
    except ProfileError as error:
        return str(error)
    return None


def _unknown_keys(content: Mapping[str, Any]) -> Iterator[str]:
    """Keys that Serve would pass over in silence: a misspelt option would simply have no effect."""
    yield from _unknown(content, ServeDeploySchema, "")
    yield from _unknown(content.get("http_options") or {}, HTTPOptionsSchema, "http_options.")
    for index, app in enumerate(content["applications"]):
        yield from _unknown(app, ServeApplicationSchema, f"applications[{index}].")
        for number, deployment in enumerate(app.get("deployments") or []):
            yield from _unknown(deployment, DeploymentSchema, f"applications[{index}].deployments[{number}].")


def _unknown(content: Mapping[str, Any], schema: type[BaseModel], prefix: str) -> Iterator[str]:
    known = set(schema.model_fields) | {field.alias for field in schema.model_fields.values() if field.alias}
    for name in content:
        if name not in known:
            yield f"{prefix}{name}: unknown key; Serve would ignore it"
