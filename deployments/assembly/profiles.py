"""The cost model of a configuration: its profile tables, read under the names of the served models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache

from deployments.assembly.image_start_tables import add_vae_to_encode
from deployments.assembly.measured_tables import may_measure, name_measured_table, read_measured_tables
from deployments.config.app import AppArgs
from deployments.config.models import ModelArgs
from deployments.models.sources import starts_from_image
from profiler import CostModel, ProfileTable, load_tables
from profiler.tables.rows import collect_rows
from tridentserve.errors import ProfileError
from tridentserve.models.families import FAMILIES

_STAND_IN_TABLES = ("tiny-cpu", "tiny-video-cpu")


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
    tables += _load_stand_ins({row.model for table in tables for row in table.rows})
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
    tables = _load_named_tables(args)
    tables += read_measured_tables(_list_missing(args, tables), args)
    known = sorted({row.model for table in tables for row in table.rows})
    names = {model.name: name_profile(model, known) for model in args.models}
    if set(names.values()) - set(known):
        tables += _load_stand_ins(known)
    for index, model in enumerate(args.models):
        if not any(row.model == names[model.name] for table in tables for row in table.rows):
            key = "name" if model.profile_as is None else "profile_as"
            raise ProfileError(
                f"models[{index}].{key}: {names[model.name]!r} is in none of the profile tables, which hold "
                f"{', '.join(known)}; set profile_as to one of them, or profile the model with "
                "scripts/profile_model.py and name its table in profiles"
                + ("; a start of the service measures it too" if may_measure(model, args) else "")
            )
    # Not every family can run at a degree above 1, so none does by the times of another.
    borrowed = {model.name for model in args.models if _borrows(model, names[model.name])}
    starting = {model.name for model in args.models if starts_from_image(model)}
    renamed = [add_vae_to_encode(_rename(table, args, names.items()), starting) for table in tables]
    return [
        replace(table, rows=tuple(row for row in table.rows if row.degree == 1 or row.model not in borrowed))
        for table in renamed
    ]


def _load_named_tables(args: AppArgs) -> list[ProfileTable]:
    """The tables of `profiles`."""
    tables: list[ProfileTable] = []
    for index, name in enumerate(args.profiles):
        try:
            tables += load_tables([name])
        except ProfileError as error:
            raise ProfileError(f"profiles[{index}]: {error}") from error
    return tables


def list_missing(args: AppArgs) -> list[ModelArgs]:
    """The models that no table of `profiles` has rows of for their device, and that the service measures itself, once.
    Raises `ProfileError` for a table that cannot be read."""
    return _list_missing(args, _load_named_tables(args))


def list_unmeasured(args: AppArgs) -> list[ModelArgs]:
    """Those of `list_missing` that have not been measured yet."""
    return [model for model in list_missing(args) if not name_measured_table(model, args).exists()]


def _list_missing(args: AppArgs, tables: Sequence[ProfileTable]) -> list[ModelArgs]:
    known = {row.model for table in tables for row in table.rows}
    device = args.cluster.device_name
    here = {row.model for table in (*tables, *_load_stand_ins(known)) for row in table.rows if row.gpu == device}
    return [model for model in args.models if may_measure(model, args) and name_profile(model, known) not in here]


def name_profile(model: ModelArgs, known: Collection[str]) -> str:
    """The name under which a model stands in the profile tables, which have the names `known`: for a tiny model without
    a profile of its own, that of another tiny model."""
    if model.profile_as is not None or model.name in known or model.tiny is None:
        return model.profile_as or model.name
    makes_videos = FAMILIES[model.tiny].frame_multiple is not None
    own = f"tiny-{model.tiny}"
    return own if own in known or own in _name_stand_ins() else "tiny-wan" if makes_videos else "tiny-sd3"


def _borrows(model: ModelArgs, profile: str) -> bool:
    """True where `name_profile` has found no profile of the model's own family."""
    return model.profile_as is None and model.tiny is not None and profile not in (model.name, f"tiny-{model.tiny}")


def find_profile(model: ModelArgs, args: AppArgs) -> str:
    """`name_profile` with the tables of a configuration. Raises `ProfileError`."""
    return name_profile(
        model, {row.model for name in args.profiles for table in load_tables([name]) for row in table.rows}
    )


@cache
def _name_stand_ins() -> frozenset[str]:
    return frozenset(row.model for table in load_tables(_STAND_IN_TABLES) for row in table.rows)


def _load_stand_ins(known: Collection[str]) -> list[ProfileTable]:
    """The tables of tiny models that come with the package, of those that are not `known`."""
    return [_leave_out(table, known) for table in load_tables(_STAND_IN_TABLES)]


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
