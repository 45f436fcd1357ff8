"""Reduces a simulation to what is kept of it: one row of results.csv, and the curves that the report draws."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from dispatch.solver.ilp import is_cut_short
from traces.reports.report import compute_percentile
from tridentserve.engine.simulated import Counts, RequestResult, SimulationResult
from tridentserve.errors import OutOfMemoryError
from tridentserve.plans import PlacementPlan
from tridentserve.stages import PlacementType, Stage

# Throughput is counted in steps of a thirtieth of the trace, of a minute in the paper's half hour.
_STEPS = 30
COLUMNS = (
    *("model", "workload", "policy", "seed", "gpus", "duration_s", "slo_scale", "requests", "slo_attainment"),
    *("mean_s", "p50_s", "p95_s", "p99_s", "mean_all_s", "p95_all_s", "completed", "failed", "ooms", "unfinished"),
    *("utilisation", "v0_share", "v1_share", "v2_share", "v3_share", "placement_switches", "moved_bytes"),
    *("bound_attainment", "end_s", "wall_s", "solve_mean_ms", "ticks", "cut_short"),
    *("index", "parameters", "options", "version", "command"),
)


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of one cell."""

    row: dict[str, Any]
    """The columns of `COLUMNS` but version and command, with `options` as JSON text."""
    details: dict[str, Any]
    """The values for figures over time, ready for JSON; see `make_details`."""


@dataclass(frozen=True, slots=True)
class TraceRun:
    """The simulation of one trace of a cell."""

    result: SimulationResult
    """The result."""
    duration_s: float
    """For how long requests arrived."""

    def list_all_s(self) -> list[float]:
        """The latencies of all requests; see `make_row`."""
        end_s = max(self.result.duration_s, self.duration_s)
        return [
            end_s - request.arrival_s if request.latency_s is None else request.latency_s
            for request in self.result.requests
        ]


def make_row(runs: Sequence[TraceRun], bound: int, wall_s: float) -> dict[str, Any]:
    """The figures of the simulations of one cell, of all their requests together. Times in seconds; a latency without
    data is None.

    `mean_s` and percentiles are of completed requests: they flatter a policy that fails the long ones. `mean_all_s`
    and `p95_all_s` count each request without a result as if it had ended when the simulation did (not before the
    trace did), so that nothing is gained by dropping requests. `moved_bytes` are loaded weights and the outputs of
    stages that went to another worker. `ooms` are requests that ended so.
    `cut_short` counts decisions of solves that hit their time limit: on another machine they may be others.
    """
    result = _join([run.result for run in runs])
    latencies = [request.latency_s for request in result.requests if request.latency_s is not None]
    all_s = [latency_s for run in runs for latency_s in run.list_all_s()]
    number, outcomes, counts = len(result.requests), result.outcomes, result.counts
    unfinished = outcomes["unfinished"]
    shares = {f"{virtual.value.lower()}_share": share for virtual, share in result.virtual_replica_shares.items()}
    return {
        "requests": number,
        "slo_attainment": result.attainment,
        "mean_s": fmean(latencies) if latencies else None,
        **{f"p{percent}_s": compute_percentile(latencies, percent) for percent in (50, 95, 99)},
        "mean_all_s": fmean(all_s),
        "p95_all_s": compute_percentile(all_s, 95),
        "completed": len(latencies),
        "failed": number - len(latencies) - unfinished,
        "ooms": outcomes[OutOfMemoryError.code],
        "unfinished": unfinished,
        "utilisation": result.utilisation,
        **shares,
        "placement_switches": counts.switches,
        "moved_bytes": counts.load_bytes + counts.transfer_bytes,
        "bound_attainment": bound / number,
        "end_s": result.duration_s,
        "wall_s": wall_s,
        "solve_mean_ms": 1000 * counts.solve_seconds / counts.ticks if counts.ticks else None,
        "ticks": counts.ticks,
        "cut_short": sum(number for found_by, number in counts.methods.items() if is_cut_short(found_by)),
    }


def make_details(runs: Sequence[TraceRun]) -> dict[str, Any]:
    """`latency_percentiles_s`: 0 to 100, of completed requests. `throughput`: [time_s, requests finished per second],
    in steps of a thirtieth of the traces, which follow each other. `placements`: [since_s, {placement type: workers}],
    `none` for workers that hold nothing. `models`: for each model the share of its requests on time, and their mean
    wait for their first stage. `latency_per_work_s`: the mean of latency over denoising steps x tokens, of completed
    requests."""
    result = _join([run.result for run in runs])
    latencies = [request.latency_s for request in result.requests if request.latency_s is not None]
    return {
        "latency_percentiles_s": [compute_percentile(latencies, percent) for percent in range(101)]
        if latencies
        else [],
        "throughput": _compute_throughput(result, sum(run.duration_s for run in runs) / _STEPS),
        "placements": [[since_s, count_types(plan)] for since_s, plan in result.placements],
        "models": _describe_models(runs),
        "latency_per_work_s": _compute_latency_per_work(result),
    }


def _join(results: Sequence[SimulationResult]) -> SimulationResult:
    """Simulations that follow each other, as one. Plans and timelines, which are not kept here, are left out."""
    if len(results) == 1:
        return results[0]
    counts, busy_seconds, start_s = Counts(), Counter[Stage](), 0.0
    requests: list[RequestResult] = []
    placements: list[tuple[float, PlacementPlan]] = []
    for result in results:
        for each in fields(Counts):
            setattr(counts, each.name, getattr(counts, each.name) + getattr(result.counts, each.name))
        busy_seconds.update(result.busy_seconds)
        requests += [_shift(request, start_s) for request in result.requests]
        placements += [(start_s + since_s, plan) for since_s, plan in result.placements]
        start_s += result.duration_s
    return SimulationResult(requests, counts, start_s, results[0].num_workers, dict(busy_seconds), placements)


def _shift(request: RequestResult, by_s: float) -> RequestResult:
    """A request that came later by this many seconds."""
    end_s, start_s = (None if time_s is None else time_s + by_s for time_s in (request.end_s, request.start_s))
    return replace(request, arrival_s=request.arrival_s + by_s, end_s=end_s, start_s=start_s, timeline=())


def _describe_models(runs: Sequence[TraceRun]) -> dict[str, dict[str, float]]:
    """A request that never started waited until the end."""
    on_time: defaultdict[str, list[bool]] = defaultdict(list)
    waits_s: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for request in run.result.requests:
            start_s = run.result.duration_s if request.start_s is None else request.start_s
            on_time[request.spec.model].append(request.slo_met)
            waits_s[request.spec.model].append(start_s - request.arrival_s)
    return {
        model: {"slo_attainment": fmean(on_time[model]), "wait_s": fmean(waits_s[model])} for model in sorted(on_time)
    }


def _compute_latency_per_work(result: SimulationResult) -> float | None:
    found = [
        each.latency_s / (each.spec.num_inference_steps * each.spec.shape.tokens)
        for each in result.requests
        if each.latency_s is not None
    ]
    return fmean(found) if found else None


def _compute_throughput(result: SimulationResult, step_s: float) -> list[list[float]]:
    ends_s = [r.end_s for r in result.requests if r.latency_s is not None and r.end_s is not None]
    finished = Counter(math.floor(end_s / step_s) for end_s in ends_s)
    return [[(index + 0.5) * step_s, finished[index] / step_s] for index in range(max(finished, default=-1) + 1)]


def count_types(plan: PlacementPlan) -> dict[str, int]:
    """The number of workers that hold each combination of stages, of whatever model."""
    held = (PlacementType.of(replica.stage for replica in replicas) for replicas in plan.replicas.values())
    counts = Counter("none" if kind is None else kind.value for kind in held)
    order = [*(kind.value for kind in PlacementType), "none"]
    return {name: counts[name] for name in order if counts[name]}
