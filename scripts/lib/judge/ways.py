"""Ways in which a service can run requests of the default model, and what its answers say of how they ran."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deployments.config.app import AppArgs
from profiler import ProfileRow, read_shipped_table, write_table
from tridentserve.stages import Stage

_DEGREES, _BATCHES = (1, 2, 4), (1, 2, 4, 8)
_WORKERS = 4
# Each further worker, and each further request of a batch, takes a little off what it would bring.
_LOSS = 0.03


@dataclass(frozen=True)
class ServingWay:
    """One way: a policy with its options."""

    name: str
    dispatch: Mapping[str, Any]
    clients: int
    """Requests at a time."""


SERVING_WAYS = (
    *(
        ServingWay(f"degree {degree}", {"policy": "b3", "max_degree": degree}, clients=_WORKERS // degree + 1)
        for degree in _DEGREES
    ),
    ServingWay("batches", {"policy": "default", "max_degree": 1, "max_batch": 4}, clients=16),
    ServingWay("preemption", {"policy": "tetriserve"}, clients=8),
)


@dataclass(frozen=True)
class WaySummary:
    """The ways in which requests ran, by their timelines."""

    degrees: dict[str, int]
    """The number of requests by the widest degree of their denoising."""
    moved: int
    """Requests that denoised in several pieces on different workers."""
    batched: int
    """Requests that shared denoising steps with others."""


def write_profile(path: Path, model: str) -> None:
    """Write a profile of a shipped model whose times let every way pay: those of one worker divided by the degree,
    and batches that take little more than one request. What is judged is not how long requests take."""
    table = read_shipped_table(f"{model}-cpu")
    kept = [row for row in table.rows if row.stage is not Stage.DIFFUSE]
    for row in table.rows:
        if row.stage is Stage.DIFFUSE and (row.degree, row.batch) == (1, 1):
            kept += [_scale(row, degree, batch) for degree, batch in itertools.product(_DEGREES, _BATCHES)]
    write_table(path, replace(table, rows=tuple(kept)))


def _scale(row: ProfileRow, degree: int, batch: int) -> ProfileRow:
    seconds = row.seconds / degree * (1 + _LOSS * (degree + batch - 2))
    return replace(row, degree=degree, batch=batch, seconds=seconds, source="modelled: every way pays")


def make_way_args(args: AppArgs, way: ServingWay, profile: Path, load: Mapping[str, Any]) -> AppArgs:
    """The service of one model of `args`, that of `load`, on four whole workers, which runs requests of one size, also
    that of `load`, in one way."""
    content = args.model_dump(mode="json", exclude_unset=True, exclude={"placement"})
    content["models"] = [model for model in content["models"] if model["name"] == load["model"]]
    content["placement"] = ["EDC"] * _WORKERS
    content["cluster"] |= {"workers_per_node": _WORKERS, "max_denoising": _WORKERS}
    content["dispatch"] = dict(way.dispatch)
    content["expected_load"] = [dict(load)]
    content["profiles"] = [str(profile)]
    return AppArgs.model_validate(content)


def summarize_timelines(timelines: Sequence[Sequence[Mapping[str, Any]]]) -> WaySummary:
    """Read off the timelines of all answers of one service how its requests ran."""
    pieces = [[run for run in timeline if run["stage"] == "diffuse"] for timeline in timelines]
    shared: dict[tuple[Any, ...], int] = {}
    for runs in pieces:
        for run in runs:
            key = _name_piece(run)
            shared[key] = shared.get(key, 0) + 1
    degrees: dict[str, int] = {}
    for runs in pieces:
        widest = str(max(run["degree"] for run in runs))
        degrees[widest] = degrees.get(widest, 0) + 1
    return WaySummary(
        degrees=dict(sorted(degrees.items())),
        moved=sum(len({tuple(run["workers"]) for run in runs}) > 1 for runs in pieces),
        batched=sum(any(shared[_name_piece(run)] > 1 for run in runs) for runs in pieces),
    )


def _name_piece(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*run["workers"], run["start_s"])
