"""Tables of unseen cells: the gap of each policy to the bound, and what it wins and loses against each other one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean, median

from lib.evaluate.tables import Results, Table

# A policy is better where its share of requests on time is larger by more than this.
_BETTER = 0.01
_MUCH_BETTER = 0.03
# Where no policy comes this near to the bound, the bound may be out of reach of any.
_TIGHT = 0.03
_RESAMPLES = 1000
_CONFIDENCE = 0.95

# The rows of one cell by policy.
CellRows = dict[str, dict[str, float]]


def compare_unseen(results: Results, policies: Sequence[str]) -> list[Table]:
    """Tables of the cells in which all policies have results: those of D alone, and those at full cost."""
    cells: dict[tuple[int, int], CellRows] = {}
    diffuse_only: dict[tuple[int, int], bool] = {}
    for cell, result in results.items():
        if cell.is_unseen and cell.policy in policies:
            cells.setdefault((cell.seed, cell.index), {})[cell.policy] = result.row
            diffuse_only[cell.seed, cell.index] = json.loads(result.row["parameters"])["diffuse_only"]
    whole = {key: rows for key, rows in cells.items() if len(rows) == len(policies)}
    kinds = (("D alone", True), ("full cost", False))
    groups = [(name, [rows for key, rows in whole.items() if diffuse_only[key] is kind]) for name, kind in kinds]
    return [table for name, group in groups if group for table in _make_tables(name, group, policies)]


def _make_tables(name: str, cells: Sequence[CellRows], policies: Sequence[str]) -> list[Table]:
    title = f"{len(cells)} unseen cells, {name}"
    return [_make_gaps_table(title, cells, policies), _make_duels_table(title, cells, policies)]


def _make_gaps_table(title: str, cells: Sequence[CellRows], policies: Sequence[str]) -> Table:
    rows = []
    tight = [cell for cell in cells if _find_gap(cell, _find_best(cell)) <= _TIGHT]
    loose = [cell for cell in cells if _find_gap(cell, _find_best(cell)) > _TIGHT]
    for policy in policies:
        rows.append(
            (
                policy,
                show_mean([_find_gap(cell, cell[policy]["slo_attainment"]) for cell in tight]),
                f"{max((_find_gap(cell, cell[policy]['slo_attainment']) for cell in tight), default=0.0):.3f}",
                show_mean([_find_best(cell) - cell[policy]["slo_attainment"] for cell in loose]),
                f"{max((_find_best(cell) - cell[policy]['slo_attainment'] for cell in loose), default=0.0):.3f}",
                show_median([_divide_by_best(cell, policy, "mean_all_s") for cell in cells]),
                show_median([_divide_by_best(cell, policy, "p95_all_s") for cell in cells]),
                f"{fmean(cell[policy]['slo_attainment'] for cell in cells):.4f}",
                f"{sum(cell[policy]['placement_switches'] for cell in cells):.0f}",
            )
        )
    header = (
        *("policy", f"gap to the bound ({len(tight)} cells)", "worst", f"to the best policy ({len(loose)} cells)"),
        *("worst", "mean latency over the best", "P95 over the best", "on time", "switches"),
    )
    note = (
        f"Gaps are of the share of requests on time. The bound counts where some policy is within {_TIGHT:g} of it; in "
        f"the other cells the best policy does. Latencies count all requests, as the median of the ratios to the best "
        f"policy of each cell. Brackets: {_CONFIDENCE:.0%} intervals, by resampling the cells."
    )
    return Table(title, header, tuple(rows), note)


def _make_duels_table(title: str, cells: Sequence[CellRows], policies: Sequence[str]) -> Table:
    first, *others = policies
    rows = []
    for other in others:
        leads = [cell[first]["slo_attainment"] - cell[other]["slo_attainment"] for cell in cells]
        rows.append(
            (
                other,
                f"{sum(lead > _BETTER for lead in leads)}",
                f"{sum(lead < -_BETTER for lead in leads)}",
                f"{sum(lead < -_MUCH_BETTER for lead in leads)}",
                show_mean(leads),
                f"{min(leads):.3f}",
                show_median([cell[first]["mean_all_s"] / cell[other]["mean_all_s"] for cell in cells]),
                show_median([cell[first]["p95_all_s"] / cell[other]["p95_all_s"] for cell in cells]),
            )
        )
    header = (
        *("against", f"ahead by over {_BETTER:g}", f"behind by over {_BETTER:g}", f"behind by over {_MUCH_BETTER:g}"),
        *("mean lead", "worst", "mean latency ratio", "P95 ratio"),
    )
    return Table(f"{title}: {first} against each", header, tuple(rows), "Leads are of the share of requests on time.")


def _find_best(cell: CellRows) -> float:
    return max(row["slo_attainment"] for row in cell.values())


def _find_gap(cell: CellRows, attainment: float) -> float:
    return next(iter(cell.values()))["bound_attainment"] - attainment


def _divide_by_best(cell: CellRows, policy: str, figure: str) -> float:
    return cell[policy][figure] / min(row[figure] for row in cell.values())


def show_mean(values: Sequence[float]) -> str:
    """The mean with its bootstrap interval."""
    return _show(values, fmean)


def show_median(values: Sequence[float]) -> str:
    """The median with its bootstrap interval."""
    return _show(values, median)


def _show(values: Sequence[float], statistic: Callable[[Sequence[float]], float]) -> str:
    """A statistic with its bootstrap interval."""
    if not values:
        return "-"
    rng = Random(0)
    drawn = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    tail = round((1 - _CONFIDENCE) / 2 * _RESAMPLES)
    return f"{statistic(values):.3f} ({drawn[tail]:.3f} to {drawn[-1 - tail]:.3f})"
