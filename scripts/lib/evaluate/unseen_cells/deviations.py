"""The table of deviations: what each gains on the paper's policy, and what the default loses without it."""

from __future__ import annotations

from collections.abc import Iterable

from dispatch.options import DEFAULT_POLICY
from dispatch.policies.paper.deviations import PAPER_POLICY, list_alone, list_without
from lib.evaluate.tables import Table
from lib.evaluate.unseen_cells.cell_table import UnseenRow
from lib.evaluate.unseen_cells.comparison import CellRows, group_by_cell, show_mean, show_median

_ADDED = {name: deviations.name for name, deviations in list_alone()}
_TAKEN = {name: deviations.name for name, deviations in list_without()}
DEVIATION_POLICIES = (PAPER_POLICY, DEFAULT_POLICY, *_ADDED.values(), *_TAKEN.values())


def make_deviations_table(rows: Iterable[UnseenRow]) -> Table:
    """One row for the default over the paper's policy, and one for each deviation, over the unseen cells in which all
    of these policies have results."""
    whole = {_name_cell(cell[DEFAULT_POLICY]): cell for cell in group_by_cell(rows, DEVIATION_POLICIES)}
    shown = [("all of them", *_compare(whole, DEFAULT_POLICY, PAPER_POLICY), "", "", "")]
    for name, added in _ADDED.items():
        gained = _compare(whole, added, PAPER_POLICY)
        lost = _compare(whole, DEFAULT_POLICY, _TAKEN[name])
        shown.append((f"`{name}`", *gained, lost[0], lost[1], lost[3]))
    header = (
        *("deviation", "on time: gained over the paper's policy", "mean latency ratio", "most in", "least in"),
        *("on time: gained by the default over itself without it", "its mean latency ratio", "it gains least in"),
    )
    note = (
        "Gains are of the share of requests on time, as means over the cells; latencies count all requests, as the "
        "median of the ratios, where below 1 is shorter. Brackets: 95% intervals, by resampling the cells."
    )
    return Table(f"{len(whole)} unseen cells: each deviation from the paper", header, tuple(shown), note)


def _name_cell(row: UnseenRow) -> str:
    return f"{row.seed}-{row.index} ({row.models}, {row.gpus} GPUs)"


def _compare(cells: dict[str, CellRows], policy: str, other: str) -> tuple[str, str, str, str]:
    """The gain of `policy` over `other`: on time, mean latency ratio, and where it gains the most and the least."""
    if not cells:
        return "-", "-", "-", "-"
    gains = {name: rows[policy].on_time - rows[other].on_time for name, rows in cells.items()}
    most, least = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
    return (
        show_mean(list(gains.values())),
        show_median([rows[policy].mean_s / rows[other].mean_s for rows in cells.values()]),
        f"{gains[most]:+.3f}: {most}",
        f"{gains[least]:+.3f}: {least}",
    )
