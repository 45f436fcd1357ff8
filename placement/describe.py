"""A placement as a table that a person can read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from profiler.memory import sum_weights_bytes
from tridentserve.cluster import WorkerSpec
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.protocols import StageTimes
from tridentserve.stages import Stage

_GB = 10**9


def describe_placement(plan: PlacementPlan, workers: Sequence[WorkerSpec], times: StageTimes) -> list[str]:
    """One line per node, with a column per GPU: the types that it holds, and the GB that its weights leave free.

    Equal nodes that follow each other share a line. Where there are several models, types bear the model's number in
    the legend that comes first.
    """
    models = sorted({replica.model for held in plan.replicas.values() for replica in held})
    short = {model: f"{number}:" if len(models) > 1 else "" for number, model in enumerate(models, start=1)}
    legend = [f"{number} {model}" for model, number in short.items() if number]
    rows: list[tuple[str, tuple[str, ...]]] = []
    for node_id, members in groupby(workers, key=lambda worker: worker.node_id):
        rows.append((node_id, tuple(_describe_worker(plan, worker, times, short) for worker in members)))
    lines: list[tuple[str, tuple[str, ...]]] = []
    for cells, alike in groupby(rows, key=lambda row: row[1]):
        names = [name for name, _ in alike]
        lines.append((names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", cells))
    head = ("node", tuple(f"GPU {index}" for index in range(max(len(cells) for _, cells in lines))))
    return legend + _align([head, *lines])


def _describe_worker(plan: PlacementPlan, worker: WorkerSpec, times: StageTimes, short: dict[str, str]) -> str:
    held = plan.replicas[worker.worker_id]
    kinds = [f"{short[model]}{_describe_kind(held, model, times)}" for model in sorted({r.model for r in held})] or [
        "-"
    ]
    free_gb = (worker.memory_bytes - sum_weights_bytes(times, held)) / _GB
    return f"{'+'.join(kinds)} {free_gb:.1f}"


def _describe_kind(held: Iterable[Replica], model: str, times: StageTimes) -> str:
    """The stages of one model, such as EDC; D/2 where two workers hold the weights of D together."""
    stages = {replica.stage for replica in held if replica.model == model}
    units = {stage: times.unit(model, stage) for stage in Stage if stage in stages}
    return "".join(f"{stage.letter}/{unit}" if unit > 1 else stage.letter for stage, unit in units.items())


def _align(rows: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
    table = [(name, *cells) for name, cells in rows]
    widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(max(map(len, table)))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in table]
