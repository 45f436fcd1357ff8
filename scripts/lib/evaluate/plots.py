"""Draws the figures of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lib.evaluate.cells import BASELINES, PAPER_WORKLOADS, Cell
from lib.evaluate.rows import CellResult
from lib.evaluate.tables import Results, compute_means, make_frame
from traces.reports.figures import Bars, draw_bar_panels, draw_lines, draw_timeline
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


def draw_plots(results: Results, bench: Path | None = None) -> Iterator[tuple[str, str, Figure]]:
    """(file name without ending, caption, figure) for all that the results hold. `bench` is what
    scripts/bench_dispatch.py printed. Raises `ConfigError` when that is no such file."""
    models = sorted({cell.model for cell in results})
    yield from _draw_overview(results, models)
    for group in GROUPS:
        for model in models:
            yield from _draw_bars(results, model, group)
    for model in models:
        yield from _draw_over_time(results, model)
    yield from _draw_sweeps(results)
    if bench is not None:
        yield "scalability", "One decision of the dispatcher, by cluster size.", _draw_scalability(bench)


def _draw_overview(results: Results, models: Sequence[str]) -> Iterator[tuple[str, str, Figure]]:
    """The claim of the project in one figure: requests on time under the default and the baselines, of all models."""
    name, label, factor = _PANELS[0]
    panels, workloads = [], set()
    for model in models:
        mine, policies = _select(results, model, "baselines")
        if len(policies) > 1:
            panels.append(_make_panel(mine, policies, name, f"{model}: {label}", factor))
            workloads |= {cell.workload for cell in mine}
    if len(panels) > 1:
        caption = (
            "Share of requests on time under the default and the baselines. Whiskers: lowest and highest of the seeds."
        )
        yield "overview", caption, draw_bar_panels("Requests on time", _order_workloads(workloads), panels)


def _select(results: Results, model: str, group: str) -> tuple[dict[Cell, CellResult], list[str]]:
    """The results of a model with the deadlines of its workloads, and the policies of a group that have any."""
    mine = {cell: result for cell, result in results.items() if cell.model == model and cell.slo_scale == 1.0}
    return mine, [name for name in GROUPS[group] if any(cell.policy == name for cell in mine)]


def _draw_bars(results: Results, model: str, group: str) -> Iterator[tuple[str, str, Figure]]:
    mine, policies = _select(results, model, group)
    if len(policies) < 2:
        return
    workloads = _order_workloads(
        {cell.workload for cell in mine if cell.policy in policies and cell.policy != "default"}
    )
    panels = [_make_panel(mine, policies, *figure) for figure in _PANELS]
    caption = (
        f"{model}: share of requests on time, mean and P95 latency of completed requests. Pale and "
        f"hatched: some requests got no result, and are not in it. A cross: none did. Whiskers: lowest and highest of "
        f"the seeds."
    )
    yield f"{group}-{model}", caption, draw_bar_panels(f"{model}: {group}", workloads, panels)


def _make_panel(results: Results, policies: Sequence[str], name: str, label: str, factor: float) -> Bars:
    """One figure of the policies on each workload of one model."""
    rows, found = (one.set_index(["policy", "workload"]) for one in (make_frame(results), compute_means(results)))
    # More than one request in a hundred got no result.
    lossy = frozenset(rows.index[rows["completed"] < 0.99 * rows["requests"]])
    bound: dict[Any, float] = (100 * found["bound_attainment"]).droplevel("policy").to_dict()
    means = (factor * found[name]).astype(object).where(found[name].notna(), None)
    values: dict[str, Any] = {policy: means.xs(policy).to_dict() for policy in policies}
    seeds = (factor * rows[name]).groupby(level=["policy", "workload"]).agg(["min", "max"])
    spreads = {policy: {w: (low, high) for w, low, high in seeds.xs(policy).itertuples()} for policy in policies}
    is_share = name == "slo_attainment"
    hatched = frozenset() if is_share else lossy
    return Bars(label, values, bound if is_share else None, "upper bound", spreads, hatched)


def _draw_over_time(results: Results, model: str) -> Iterator[tuple[str, str, Figure]]:
    """The figures over time of the workload that changes most, with the first seed."""
    mine = {c: r for c, r in results.items() if c.model == model and c.slo_scale == 1.0 and c.seed == 0}
    if not mine:
        return
    workloads = _order_workloads({cell.workload for cell in mine})
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
        draw_timeline(title, throughput, placement, placed, end_s),
    )
    yield f"cdf-{model}", f"{title}: latency of completed requests, as share of all requests.", _draw_cdf(title, chosen)


def _draw_cdf(title: str, chosen: Sequence[tuple[str, CellResult]]) -> Figure:
    series = {
        policy: [
            (latency_s, percent * result.row["completed"] / result.row["requests"])
            for percent, latency_s in enumerate(result.details["latency_percentiles_s"])
        ]
        for policy, result in chosen
    }
    return draw_lines(title, "latency, s", "requests finished, %", series, log_x=True, markers=False)


def _draw_sweeps(results: Results) -> Iterator[tuple[str, str, Figure]]:
    found = compute_means(results).sort_values("slo_scale")
    for (model, workload), mine in found.groupby(["model", "workload"]):
        if mine["slo_scale"].nunique() < 2:
            continue
        series = {}
        for policy in _order_policies(set(mine["policy"])):
            own = mine[mine["policy"] == policy]
            series[policy] = list(zip(own["slo_scale"], 100 * own["slo_attainment"], strict=True))
        bound = sorted(set(zip(mine["slo_scale"], 100 * mine["bound_attainment"], strict=True)))
        title = f"{model}, {workload}"
        figure = draw_lines(title, "SLO scale (1 = the workload's deadlines)", "on time, %", series, bound=bound)
        yield f"sweep-{model}-{workload}", f"{title}: share on time when all deadlines are scaled.", figure


def _draw_scalability(path: Path) -> Figure:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["rows"]
        rows = [row for row in found if row["policy"] == found[0]["policy"]]
        series = {name: [(float(row["gpus"]), float(row[f"{name}_ms"])) for row in rows] for name in ("p50", "p99")}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is not the output of scripts/bench_dispatch.py: {error!r}") from None
    series["paper"] = [(float(gpus), float(ms)) for gpus, ms in _PAPER_SOLVE_MS]
    return draw_lines(rows[0]["policy"], "GPUs", "time of one decision, ms", series, log_x=True, log_y=True)


def _order_workloads(workloads: set[str]) -> list[str]:
    """The paper's in its order, then the others."""
    return [*(name for name in PAPER_WORKLOADS if name in workloads), *sorted(workloads - set(PAPER_WORKLOADS))]


def _order_policies(names: set[str]) -> list[str]:
    known = list(dict.fromkeys(name for group in GROUPS.values() for name in group))
    return [*(name for name in known if name in names), *sorted(names - set(known))]
