"""Runs the offline scenario, and makes its table: how long each policy takes for a set of requests."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from tqdm import tqdm

from lib.evaluate.cells import Cell, Settings
from lib.evaluate.related_systems.offline_sets import OfflineQuestion, run_offline
from lib.evaluate.rows import CellResult
from lib.evaluate.runner import run_cells
from lib.evaluate.tables import Table

_FIGURES = ("makespan_s", "mean_s", "p95_s", "over_bound")


def serve_sets(
    question: OfflineQuestion, cells: Sequence[Cell], settings: Settings, jobs: int
) -> dict[Cell, CellResult]:
    """The results of the cells, in their order; a cell that fails has none, and is told of on stderr."""
    found: dict[Cell, CellResult] = {}
    with tqdm(total=len(cells), unit="cell", file=sys.stderr) as bar:
        for cell, result in run_cells(cells, settings, jobs, partial(run_offline, question)):
            if isinstance(result, str):
                bar.write(f"evaluate: {cell.name}: {result}", file=sys.stderr)
            else:
                found[cell] = result
            bar.update()
    return {cell: found[cell] for cell in cells if cell in found}


def list_set_rows(results: Mapping[Cell, CellResult]) -> list[dict[str, Any]]:
    """One row for each policy and set. `mean_s` and `p95_s` are of all requests, from time zero; one without a result
    counts as if it had ended when the simulation did, and leaves `makespan_s` and `over_bound` NaN."""
    rows = []
    for cell, result in results.items():
        makespan_s, bound_s = result.details["makespan_s"] or math.nan, result.details["bound_s"]
        rows.append(
            {
                "policy": cell.policy,
                "set": cell.index,
                "bound_s": bound_s,
                "makespan_s": makespan_s,
                "mean_s": result.row["mean_all_s"],
                "p95_s": result.row["p95_all_s"],
                "over_bound": makespan_s / bound_s,
                "without_result": result.row["requests"] - result.row["completed"],
            }
        )
    return rows


def make_offline_table(rows: Sequence[Mapping[str, Any]], policies: Sequence[str], title: str) -> Table:
    """The mean of each figure over the sets, with the lowest and the highest."""
    lines = []
    for policy in policies:
        if own := [row for row in rows if row["policy"] == policy]:
            spans = (_format_span([row[name] for row in own], 3 if name == "over_bound" else 0) for name in _FIGURES)
            lines.append((policy, f"{len(own)}", *spans, f"{sum(row['without_result'] for row in own)}"))
    header = ("policy", "sets", "makespan s", "mean completion s", "P95 s", "makespan over the bound", "without result")
    note = (
        "All requests are there at time zero. Means over the sets, with the lowest and the highest. The bound is a "
        "makespan below which no schedule comes."
    )
    return Table(title, header, tuple(lines), note)


def _format_span(values: Sequence[float], digits: int) -> str:
    if any(map(math.isnan, values)):
        return "-"
    return f"{fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
