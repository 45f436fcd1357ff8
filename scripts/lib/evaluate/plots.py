"""Which figures an evaluation has, and what they show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lib.evaluate.rows import CellResult
from lib.evaluate.tables import BASELINES, PAPER_WORKLOADS, Results, means
from traces.reports.figures import Bars, bar_panels, lines, timeline
from tridentserve.errors import ConfigError

# Policies that are compared with one another, by the name of the comparison.
GROUPS = {
    "baselines": ("default", *BASELINES),
    "ablations": ("default", "wo-switch", "wo-stage-aware", "wo-scheduler"),
    "related": ("default", "tetriserve", "genserve", "dit-serve", "patchedserve", "edf"),
}
# Milliseconds of one dispatcher solve by GPUs (TridentServe, arXiv 2510.02838, table 4).
_PAPER_SOLVE_MS = ((128, 25), (256, 26), (512, 36), (1024, 45), (4096, 98))
# Figure of a row, axis label, factor to its unit.
_PANELS = (
    ("slo_attainment", "on time, %", 100.0),
    ("mean_s", "mean latency, s", 1.0),
    ("p95_s", "P95 latency, s", 1.0),
)


def plots(results: Results, bench: Path | None = None) -> Iterator[tuple[str, str, Figure]]:
    """(file name without ending, caption, figure) for all that the results hold. `bench` is what
    scripts/bench_dispatch.py printed. Raises `ConfigError` when that is no such file."""
    models = sorted({cell.model for cell in results})
    for group in GROUPS:
        for model in models:
            yield from _bars(results, model, group)
    for model in models:
        yield from _over_time(results, model)
    yield from _sweeps(results)
    if bench is not None:
        yield "scalability", "One decision of the dispatcher, by cluster size.", _scalability(bench)


def _bars(results: Results, model: str, group: str) -> Iterator[tuple[str, str, Figure]]:
    mine = {cell: result for cell, result in results.items() if cell.model == model and cell.slo_scale == 1.0}
    policies = [name for name in GROUPS[group] if any(cell.policy == name for cell in mine)]
    if len(policies) < 2:
        return
    compared = {cell.workload for cell in mine if cell.policy in policies and cell.policy != "default"}
    workloads = _ordered(compared)
    found = means(mine)
    bound = {w: 100 * row["bound_attainment"] for (_, w, _, _), row in found.items() if w in workloads}
    panels = []
    for name, label, factor in _PANELS:
        values = {
            policy: {w: _scaled(found.get((model, w, 1.0, policy), {}).get(name), factor) for w in workloads}
            for policy in policies
        }
        is_share = name == "slo_attainment"
        spreads = {policy: _spread(mine, policy, name, factor) for policy in policies}
        lost = frozenset() if is_share else _lossy(mine)
        panels.append(Bars(label, values, bound if is_share else None, "upper bound", spreads, lost))
    caption = (
        f"{model}: share of requests on time, mean and P95 latency of completed requests. Pale and "
        f"hatched: some requests got no result, and are not in it. A cross: none did. Whiskers: lowest and highest of "
        f"the seeds."
    )
    yield f"{group}-{model}", caption, bar_panels(f"{model}: {group}", workloads, panels)


def _lossy(results: Results) -> frozenset[tuple[str, str]]:
    """Policies and workloads where more than one request in a hundred got no result."""
    rows = [(cell, result.row) for cell, result in results.items()]
    return frozenset((cell.policy, cell.workload) for cell, row in rows if row["completed"] < 0.99 * row["requests"])


def _spread(results: Results, policy: str, name: str, factor: float) -> dict[str, tuple[float, float]]:
    values: dict[str, list[float]] = {}
    for cell, result in results.items():
        if cell.policy == policy and result.row[name] is not None:
            values.setdefault(cell.workload, []).append(factor * result.row[name])
    return {workload: (min(found), max(found)) for workload, found in values.items()}


def _over_time(results: Results, model: str) -> Iterator[tuple[str, str, Figure]]:
    """Of the workload that changes most, and the first seed."""
    mine = {c: r for c, r in results.items() if c.model == model and c.slo_scale == 1.0 and c.seed == 0}
    if not mine:
        return
    workloads = _ordered({cell.workload for cell in mine})
    workload = "dynamic" if "dynamic" in workloads else workloads[-1]
    here = {cell.policy: result for cell, result in mine.items() if cell.workload == workload}
    chosen = [(policy, here[policy]) for policy in GROUPS["baselines"] if policy in here]
    if not chosen:
        return
    shown = dict(chosen)
    placed = "default" if "default" in shown else chosen[0][0]
    end_s = max(result.row["end_s"] for _, result in chosen)
    throughput = {policy: result.details["throughput"] for policy, result in chosen}
    placement = shown[placed].details["placements"]
    title = f"{model}, {workload}"
    yield (
        f"timeline-{model}",
        f"{title}: requests finished over time (arrivals end after {shown[placed].row['duration_s'] / 60:g} min), and "
        f"how many GPUs hold which stages.",
        timeline(title, throughput, placement, placed, end_s),
    )
    yield f"cdf-{model}", f"{title}: latency of completed requests, as share of all requests.", _cdf(title, chosen)


def _cdf(title: str, chosen: Sequence[tuple[str, CellResult]]) -> Figure:
    series = {
        policy: [
            (latency_s, percent * result.row["completed"] / result.row["requests"])
            for percent, latency_s in enumerate(result.details["latency_percentiles_s"])
        ]
        for policy, result in chosen
    }
    return lines(title, "latency, s", "requests finished, %", series, log_x=True, markers=False)


def _sweeps(results: Results) -> Iterator[tuple[str, str, Figure]]:
    found = means(results)
    for model, workload in sorted({(cell.model, cell.workload) for cell in results}):
        mine = {key: row for key, row in sorted(found.items()) if key[:2] == (model, workload)}
        if len({key[2] for key in mine}) < 2:
            continue
        series = {
            policy: [(key[2], 100 * row["slo_attainment"]) for key, row in mine.items() if key[3] == policy]
            for policy in _policies({key[3] for key in mine})
        }
        bound = sorted({(key[2], 100 * row["bound_attainment"]) for key, row in mine.items()})
        title = f"{model}, {workload}"
        figure = lines(title, "SLO scale (1 = the workload's deadlines)", "on time, %", series, bound=bound)
        yield f"sweep-{model}-{workload}", f"{title}: share on time when all deadlines are scaled.", figure


def _scalability(path: Path) -> Figure:
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["rows"]
        series = {name: [(float(row["gpus"]), float(row[f"{name}_ms"])) for row in rows] for name in ("p50", "p99")}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is not the output of scripts/bench_dispatch.py: {error!r}") from None
    series["paper"] = [(float(gpus), float(ms)) for gpus, ms in _PAPER_SOLVE_MS]
    return lines("dispatcher", "GPUs", "time of one decision, ms", series, log_x=True, log_y=True)


def _ordered(workloads: set[str]) -> list[str]:
    """The paper's in its order, then the others."""
    return [*(name for name in PAPER_WORKLOADS if name in workloads), *sorted(workloads - set(PAPER_WORKLOADS))]


def _policies(names: set[str]) -> list[str]:
    known = list(dict.fromkeys(name for group in GROUPS.values() for name in group))
    return [*(name for name in known if name in names), *sorted(names - set(known))]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value
