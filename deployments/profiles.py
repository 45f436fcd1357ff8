"""The cost model of a configuration: its profile tables, read under the names of the served models."""

from __future__ import annotations

from dataclasses import replace

from deployments.config import AppArgs
from profiler import CostModel, ProfileTable, load_tables
from tridentserve.errors import ProfileError


def cost_model(args: AppArgs) -> CostModel:
    """Stage times of all models of `args` on its device. Raises `ProfileError`, beginning with the key at fault."""
    tables = served_tables(args)
    try:
        return CostModel(tables, args.cluster.device_name)
    except ProfileError as error:
        raise ProfileError(f"profiles: {error}") from error


def served_tables(args: AppArgs) -> list[ProfileTable]:
    """The tables of `args` with the models under the names by which they are served. Raises `ProfileError`, beginning
    with the key at fault."""
    tables: list[ProfileTable] = []
    for index, name in enumerate(args.profiles):
        try:
            tables += load_tables([name])
        except ProfileError as error:
            raise ProfileError(f"profiles[{index}]: {error}") from error
    for index, model in enumerate(args.models):
        if not any(row.model == model.profile_name for table in tables for row in table.rows):
            known = sorted({row.model for table in tables for row in table.rows})
            key = "name" if model.profile_as is None else "profile_as"
            raise ProfileError(
                f"models[{index}].{key}: {model.profile_name!r} is in none of the profile tables, which hold "
                f"{', '.join(known)}; set profile_as to one of them, or profile the model"
            )
    return [_renamed(table, args) for table in tables]


def _renamed(table: ProfileTable, args: AppArgs) -> ProfileTable:
    """The rows of the served models under their own names, up to the largest degree that is to be used.
    Two models may share one profile."""
    max_degree = args.dispatch.max_degree or args.cluster.workers_per_node
    names = [(model.name, model.profile_name) for model in args.models]
    rows = (
        replace(row, model=name)
        for name, profiled in names
        for row in table.rows
        if row.model == profiled and row.degree <= max_degree
    )
    weights = (replace(row, model=name) for name, profiled in names for row in table.weights if row.model == profiled)
    return replace(table, rows=tuple(rows), weights=tuple(weights))
