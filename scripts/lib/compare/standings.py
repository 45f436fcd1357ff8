"""The outcome of a contest of policies: shares on time, mean and P95 latency, and their ratios to the first policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lib.compare.contest import ContestRun
from traces.reports.report import compute_percentile

_FIGURES = ("on_time", "mean_s", "p95_s")


def summarize(runs: Sequence[ContestRun], policies: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each trace and policy: the mean of each figure over the repetitions, its least and its largest value,
    the ratios of its latencies to those of the first policy, and by how much it is behind that one."""
    ordered = sorted(runs, key=lambda run: run.repetition)
    rows = []
    for trace in dict.fromkeys(run.trace for run in ordered):
        figures = {
            policy: [_measure(run) for run in ordered if (run.trace, run.policy) == (trace, policy)]
            for policy in policies
        }
        for policy, found in figures.items():
            described = {name: _describe([run[name] for run in found]) for name in _FIGURES}
            rows.append({"trace": trace, "policy": policy} | described | _compare(figures[policies[0]], found))
    return rows


def format_standings(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for people."""
    lines = [
        f"{'trace':10} {'policy':22} {'on time':>8} {'mean s':>8} {'P95 s':>8} {'mean ratio':>11} {'P95 ratio':>10}"
    ]
    for row in rows:
        lines.append(
            f"{row['trace']:10} {row['policy']:22} {row['on_time']['mean']:8.3f} {row['mean_s']['mean']:8.3f} "
            f"{row['p95_s']['mean']:8.3f} {row['mean_ratio']:11.2f} {row['p95_ratio']:10.2f}"
        )
    return "\n".join(lines)


def _measure(run: ContestRun) -> dict[str, float]:
    mean_s = fmean(run.latencies_s) if run.latencies_s else math.nan
    return {"on_time": run.on_time, "mean_s": mean_s, "p95_s": compute_percentile(run.latencies_s, 95) or math.nan}


def _describe(values: Sequence[float]) -> dict[str, float]:
    return {"mean": round(fmean(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def _compare(first: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Latencies of `other` over those of `first`, and how many more of its requests were late."""
    pairs = list(zip(first, other, strict=True))
    return {
        "behind": round(fmean(one["on_time"] - two["on_time"] for one, two in pairs), 4),
        "mean_ratio": round(fmean(two["mean_s"] / one["mean_s"] for one, two in pairs), 4),
        "p95_ratio": round(fmean(two["p95_s"] / one["p95_s"] for one, two in pairs), 4),
    }
