"""The configuration of one cell of a service: the part of the nodes, and what belongs to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from deployments.assembly.planning import list_service_workers
from deployments.config.app import AppArgs, SchedulerArgs, WorkerPlacement
from tridentserve.cells.division import divide_nodes


def take_cell(args: AppArgs, number: int) -> AppArgs:
    """The configuration of a cell, as if it were a service by itself: whole nodes, the models that it serves, and of
    limits of the whole service its share. Of a service with one cell it is `args` itself."""
    num_cells = args.scheduler.cells
    if num_cells == 1:
        return args
    cells = divide_nodes(list_service_workers(args), num_cells)
    begin = sum(len(workers) for workers in cells[:number])
    models = [model for model in args.models if model.cells is None or number in model.cells]
    names = {model.name for model in models}
    changes: dict[str, Any] = {
        "scheduler": SchedulerArgs(),
        "cluster": args.cluster.model_copy(update={"nodes": len(cells[number]) // args.cluster.workers_per_node}),
        "models": [model.model_copy(update={"cells": None}) for model in models],
        "placement": _take_placement(args.placement, begin, begin + len(cells[number])),
        "expected_load": [load for load in args.expected_load if load.model in names],
        "dispatch": args.dispatch.model_copy(
            update={
                "request_weights": _take_names(args.dispatch.request_weights, names),
                "fair_shares": _take_names(args.dispatch.fair_shares, names),
                "pack_sizes": tuple(name for name in args.dispatch.pack_sizes if name in names),
                "ring_sizes": tuple(name for name in args.dispatch.ring_sizes if name in names),
            }
        ),
        "max_queued_requests": -(-args.max_queued_requests // num_cells),
        "decision_log": _name_file(args.decision_log, number),
        "loras_file": _name_file(args.loras_file, number),
    }
    return args.model_copy(update={key: value for key, value in changes.items() if value != getattr(args, key)})


def name_workers(args: AppArgs, number: int) -> str:
    """The beginning of the ids of a cell's workers, so that no two workers of a service have the same one. It is empty
    where there is one cell."""
    return f"c{number}" if args.scheduler.cells > 1 else ""


def _take_placement(
    placement: Literal["auto"] | list[WorkerPlacement], begin: int, end: int
) -> Literal["auto"] | list[WorkerPlacement]:
    return placement if placement == "auto" else placement[begin:end]


def _take_names(weights: Any, names: set[str]) -> Any:
    return None if weights is None else {name: weight for name, weight in weights.items() if name in names} or None


def _name_file(path: Path | None, number: int) -> Path | None:
    return None if path is None else path.with_name(f"{path.stem}.cell{number}{path.suffix}")
