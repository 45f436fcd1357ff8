"""Two plots of unseen cells: the shares of cells in which a policy has few requests late, and in which it is fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lib.evaluate.unseen_cells.cell_table import UnseenRow
from lib.evaluate.unseen_cells.comparison import CellRows, divide_by_best, find_lack, group_by_cell
from traces.reports.figures import draw_lines, write_png


def write_unseen_plots(table: Path, rows: Sequence[UnseenRow], policies: Sequence[str]) -> Iterator[Path]:
    """Writes the plots beside the table that the rows are from, of the cells in which all policies have results."""
    cells = group_by_cell(rows, policies)
    if cells:
        for name, figure in (("on-time", _draw_lacks(cells, policies)), ("latency", _draw_ratios(cells, policies))):
            path = table.with_name(f"{table.stem}-{name}.png")
            path.write_bytes(write_png(figure))
            yield path


def _draw_lacks(cells: Sequence[CellRows], policies: Sequence[str]) -> Figure:
    series = {policy: _rank([100 * find_lack(cell, policy) for cell in cells]) for policy in policies}
    label = "requests on time: points behind the bound, or the best policy where no policy is near it"
    return draw_lines(f"{len(cells)} unseen cells: on time", label, "cells, %", series, markers=False)


def _draw_ratios(cells: Sequence[CellRows], policies: Sequence[str]) -> Figure:
    series = {policy: _rank([divide_by_best(cell, policy, "p95_s") for cell in cells]) for policy in policies}
    label = "P95 latency over the shortest of all policies"
    return draw_lines(f"{len(cells)} unseen cells: P95", label, "cells, %", series, log_x=True, markers=False)


def _rank(values: Sequence[float]) -> list[tuple[float, float]]:
    """The points of the cumulative distribution."""
    return [(value, 100 * (number + 1) / len(values)) for number, value in enumerate(sorted(values))]
