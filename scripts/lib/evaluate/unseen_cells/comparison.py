"""Tables of unseen cells: the gap of each policy to the bound, and what it wins and loses against each other one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Literal

from lib.bench.figures import CONFIDENCE, compute_interval
from lib.evaluate.tables import Table
from lib.evaluate.unseen_cells.cell_table import UnseenRow

# A policy is better where its share of requests on time is larger by more than this.
_BETTER = 0.01
_MUCH_BETTER = 0.03
# Where no policy comes this near to the bound, the bound may be out of reach of any.
_TIGHT = 0.03

# The rows of one cell by policy.
CellRows = dict[str, UnseenRow]
Latency = Literal["mean_s", "p95_s"]
_LATENCIES: tuple[Latency, ...] = ("mean_s", "p95_s")


def compare_unseen(rows: Iterable[UnseenRow], policies: Sequence[str]) -> list[Table]:
    """Tables of the cells in which all policies have results: those at full cost, and those of D alone."""
    kinds = (("full cost", False), ("D alone", True))
    whole = group_by_cell(rows, policies)
    groups = [(name, [cell for cell in whole if is_diffuse_only(cell) is kind]) for name, kind in kinds]
    return [table for name, group in groups if group for table in _make_tables(name, group, policies)]


def sum_up_unseen(rows: Iterable[UnseenRow], policies: Sequence[str]) -> list[Table]:
    """A table of requests on time and one of latencies, of all cells in which all policies have results."""
    cells = group_by_cell(rows, policies)
    return [_sum_up_on_time(cells, policies), _sum_up_latencies(cells, policies)]


def _sum_up_on_time(cells: Sequence[CellRows], policies: Sequence[str]) -> Table:
    full = [cell for cell in cells if not is_diffuse_only(cell)]
    groups = (
        ("bound near", [cell for cell in full if _is_tight(cell)]),
        ("bound far", [cell for cell in full if not _is_tight(cell)]),
        ("D alone", [cell for cell in cells if is_diffuse_only(cell)]),
    )
    shown = []
    for policy in policies:
        behind = [_find_best(cell) - cell[policy].on_time for cell in cells]
        shown.append(
            (
                policy,
                f"{fmean(cell[policy].on_time for cell in cells):.3f}",
                *(f"{sum(lack > limit for lack in behind)}" for limit in (_BETTER, _MUCH_BETTER)),
                *(show_mean([find_lack(cell, policy) for cell in group]) for _, group in groups),
            )
        )
    header = (
        *("policy", "share on time", f"cells behind by over {_BETTER:g}", f"by over {_MUCH_BETTER:g}"),
        *(f"gap, {name} ({len(group)})" for name, group in groups),
    )
    note = (
        f"Share on time: the mean over the {len(cells)} cells. Behind: another policy of the table has more on time, "
        "by that share of the requests. Gap: the share that is missing to the most that can be had, as a mean over "
        f"the cells of a kind (their number in brackets), with its {CONFIDENCE:.0%} interval. The most that can be had "
        f"is the bound of a linear program. Where no policy comes within {_TIGHT:g} of it (bound far), nobody knows "
        "whether more can be had, and the best policy takes its place. D alone: E and C take no time in these cells."
    )
    return Table(f"{len(cells)} unseen cells: requests on time", header, tuple(shown), note)


def _sum_up_latencies(cells: Sequence[CellRows], policies: Sequence[str]) -> Table:
    shown = [
        (
            policy,
            *(
                show_median([divide(cell, policy, name) for cell in cells])
                for divide in (divide_by_rival, divide_by_best)
                for name in _LATENCIES
            ),
        )
        for policy in policies
    ]
    header = (
        "policy",
        *(f"{name} over {other}" for other in ("the rival's", "the shortest") for name in ("mean", "P95")),
    )
    note = (
        "Latencies count all requests, and each figure is the median over the cells of a ratio, below 1 where the "
        "policy is faster. Its rival in a cell is the other policy with the most requests on time. The shortest "
        f"latency is that of any policy, however many requests that one has late. Brackets: {CONFIDENCE:.0%} "
        "intervals, by resampling the cells."
    )
    return Table(f"{len(cells)} unseen cells: latencies", header, tuple(shown), note)


def group_by_cell(rows: Iterable[UnseenRow], policies: Sequence[str]) -> list[CellRows]:
    """The cells in which all policies have results."""
    cells: dict[tuple[int, int], CellRows] = {}
    for row in rows:
        if row.policy in policies:
            cells.setdefault((row.seed, row.index), {})[row.policy] = row
    return [cell for cell in cells.values() if len(cell) == len(policies)]


def is_diffuse_only(cell: CellRows) -> bool:
    """True where D alone takes time."""
    return next(iter(cell.values())).diffuse_only


def _make_tables(name: str, cells: Sequence[CellRows], policies: Sequence[str]) -> list[Table]:
    title = f"{len(cells)} unseen cells, {name}"
    return [_make_gaps_table(title, cells, policies), _make_duels_table(title, cells, policies)]


def _make_gaps_table(title: str, cells: Sequence[CellRows], policies: Sequence[str]) -> Table:
    rows = []
    tight = [cell for cell in cells if _is_tight(cell)]
    loose = [cell for cell in cells if not _is_tight(cell)]
    for policy in policies:
        rows.append(
            (
                policy,
                show_mean([find_lack(cell, policy) for cell in tight]),
                f"{max((find_lack(cell, policy) for cell in tight), default=0.0):.3f}",
                show_mean([find_lack(cell, policy) for cell in loose]),
                f"{max((find_lack(cell, policy) for cell in loose), default=0.0):.3f}",
                show_median([divide_by_best(cell, policy, "mean_s") for cell in cells]),
                show_median([divide_by_best(cell, policy, "p95_s") for cell in cells]),
                f"{fmean(cell[policy].on_time for cell in cells):.4f}",
                f"{sum(cell[policy].switches for cell in cells):.0f}",
            )
        )
    header = (
        *("policy", f"gap to the bound ({len(tight)} cells)", "worst", f"to the best policy ({len(loose)} cells)"),
        *("worst", "mean over the shortest", "P95 over the shortest", "on time", "switches"),
    )
    return Table(title, header, tuple(rows), _describe_figures())


def _describe_figures() -> str:
    return (
        f"Gaps are of the share of requests on time. The bound counts where some policy is within {_TIGHT:g} of it; in "
        f"the other cells the best policy does. Latencies count all requests, as medians over the cells of the ratio "
        f"to the shortest of all policies. Brackets: {CONFIDENCE:.0%} intervals, by resampling the cells."
    )


def _make_duels_table(title: str, cells: Sequence[CellRows], policies: Sequence[str]) -> Table:
    first, *others = policies
    rows = []
    for other in others:
        leads = [cell[first].on_time - cell[other].on_time for cell in cells]
        rows.append(
            (
                other,
                f"{sum(lead > _BETTER for lead in leads)}",
                f"{sum(lead < -_BETTER for lead in leads)}",
                f"{sum(lead < -_MUCH_BETTER for lead in leads)}",
                show_mean(leads),
                f"{min(leads):.3f}",
                show_median([cell[first].mean_s / cell[other].mean_s for cell in cells]),
                show_median([cell[first].p95_s / cell[other].p95_s for cell in cells]),
            )
        )
    header = (
        *("against", f"ahead by over {_BETTER:g}", f"behind by over {_BETTER:g}", f"behind by over {_MUCH_BETTER:g}"),
        *("mean lead", "worst", "mean latency ratio", "P95 ratio"),
    )
    return Table(f"{title}: {first} against each", header, tuple(rows), "Leads are of the share of requests on time.")


def _find_best(cell: CellRows) -> float:
    return max(row.on_time for row in cell.values())


def _is_tight(cell: CellRows) -> bool:
    """True where some policy is near the bound of the linear program."""
    return _get_bound(cell) - _find_best(cell) <= _TIGHT


def _get_bound(cell: CellRows) -> float:
    return next(iter(cell.values())).bound


def divide_by_rival(cell: CellRows, policy: str, figure: Latency) -> float:
    """A latency of a policy over that of the other one with the most requests on time, of several the faster one."""
    others = [row for name, row in cell.items() if name != policy] or [cell[policy]]
    rival = max(others, key=lambda row: (row.on_time, -row.mean_s))
    return float(getattr(cell[policy], figure)) / float(getattr(rival, figure))


def divide_by_best(cell: CellRows, policy: str, figure: Latency) -> float:
    """A latency of a policy over the shortest one of all policies, however many requests that one has on time."""
    best: float = min(getattr(row, figure) for row in cell.values())
    return float(getattr(cell[policy], figure)) / best


def find_lack(cell: CellRows, policy: str) -> float:
    """The share of requests that a policy has on time less than the bound allows, or where no policy is near the bound
    less than the best policy."""
    return (_get_bound(cell) if _is_tight(cell) else _find_best(cell)) - cell[policy].on_time


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
    low, high = compute_interval(values, statistic)
    return f"{statistic(values):.3f} ({low:.3f} to {high:.3f})"
