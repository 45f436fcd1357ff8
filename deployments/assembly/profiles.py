"""The cost model of a configuration: its profile tables, read under the names of the served models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from deployments.config.app import AppArgs
from profiler import CostModel, ProfileTable, load_tables
from profiler.tables.rows import collect_rows
from tridentserve.errors import ProfileError


def make_cost_model(args: AppArgs) -> CostModel:
    """Stage times of all models of `args` on its device. Raises `ProfileError`, beginning with the key at fault."""
    tables = load_served_tables(args)
    try:
        return CostModel(tables, args.cluster.device_name)
    except ProfileError as error:
        raise ProfileError(f"profiles: {error}") from error


def add_models(times: CostModel, args: AppArgs, tables: Sequence[ProfileTable]) -> None:
    """Have a cost model cover the models of `args` that it lacks, by the tables of `load_served_tables`. Raises
    `ProfileError` for tables that are wrong, and for a model that was profiled otherwise when it had the same name:
    what was planned with that stays in many places."""
    for index, model in enumerate(args.models):
        if model.name in times.models and times.collect_rows(model.name) != collect_rows(tables, model.name):
            raise ProfileError(
                f"models[{index}].name: {model.name!r} had another profile when it was served before; give it another "
                "name, or restart the service"
            )
    _extend(times, tables)


def add_profiles(times: CostModel, args: AppArgs, profiles: Mapping[str, str]) -> None:
    """Have a cost model cover models (`profiles`: under which name the tables of `args` have each) that it does not
    cover yet. Raises `ProfileError`."""
    tables = [table for name in args.profiles for table in load_tables([name])]
    _extend(times, [_rename(table, args, profiles.items()) for table in tables])


def _extend(times: CostModel, tables: Sequence[ProfileTable]) -> None:
    known = times.models
    further = [_leave_out(table, known) for table in tables]
    times.extend([table for table in further if table.rows])


def _leave_out(table: ProfileTable, models: Collection[str]) -> ProfileTable:
    rows = tuple(row for row in table.rows if row.model not in models)
    return replace(table, rows=rows, weights=tuple(row for row in table.weights if row.model not in models))


def load_served_tables(args: AppArgs) -> list[ProfileTable]:
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
    names = [(model.name, model.profile_name) for model in args.models]
    return [_rename(table, args, names) for table in tables]


def _rename(table: ProfileTable, args: AppArgs, names: Collection[tuple[str, str]]) -> ProfileTable:
    """The rows of models (served name and profiled name) under the names by which they are served, up to the largest
    degree that is to be used. Two models may share one profile."""
    max_degree = args.dispatch.max_degree or args.cluster.workers_per_node
    rows = (
        replace(row, model=name)
        for name, profiled in names
        for row in table.rows
        if row.model == profiled and row.degree <= max_degree
    )
    weights = (replace(row, model=name) for name, profiled in names for row in table.weights if row.model == profiled)
    return replace(table, rows=tuple(rows), weights=tuple(weights))
