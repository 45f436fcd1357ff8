"""Measures what it costs to divide a cluster into cells with a scheduler each, by simulation.

The same trace of one mix, with Poisson arrivals, is served by one scheduler for all GPUs and by several, at each load.
A router sends each request to the cell that is predicted to finish it first, by summaries that cells publish four times
a second. With `--lose` one of the cells is lost in the middle of the trace with all its workers, and its requests are
sent to the others. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from lib.benchmark import describe_run, print_result
from lib.command_line import PROFILES, Parser, make_positive, parse_not_negative, parse_policy_name, parse_whole_number
from lib.evaluate.cells import make_paper_cluster

from deployments.assembly.cells import simulate_cells
from deployments.assembly.simulation import SimulationSetup, load_times, make_cluster_options, set_deadlines
from dispatch.options import DEFAULT_POLICY
from profiler import CostModel, read_shipped_table
from traces.reports.report import compute_percentile
from traces.simulated import make_arrivals
from traces.workloads.arrivals import draw_poisson
from traces.workloads.mixes import draw, load_figure, load_mix
from tridentserve.engine.simulated import SimulationOptions, TimedRequest
from tridentserve.engine.simulated.cells import CellLoss
from tridentserve.errors import TridentServeError


def main() -> int:
    options = _parse_arguments()
    run = describe_run(libraries=("highspy", "pulp"))
    try:
        rows = _measure(options)
    except TridentServeError as error:
        print(f"bench_cells: {error}", file=sys.stderr)
        return 2
    print_result(run, {"rows": rows})
    return 0


def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    table = read_shipped_table(options.profiles)
    cluster = make_paper_cluster(options.gpus, table.rows[0].gpu)
    make_times = load_times(cluster, [options.profiles])
    setup = SimulationSetup(
        cluster.list_workers()[: options.gpus],
        make_times,
        make_cluster_options(cluster, options.policy),
        engine=SimulationOptions(solve_time=options.solve_time_s, seed=options.seed),
    )
    rows: list[dict[str, Any]] = []
    print("  load  cells  lost  requests  on time  behind first   mean s    p95 s   ms a tick    took")
    for load in options.loads:
        arrivals = _draw_arrivals(options, make_times(), load)
        whole = None
        for cells in options.cells:
            for lost in (False, True) if options.lose and cells > 1 else (False,):
                row = _measure_row(arrivals, setup, cells, lost, options)
                whole = row["on_time"] if whole is None else whole
                row = {"load": load, **row, "behind": round(whole - row["on_time"], 4)}
                print(
                    f"{load:6.2f} {cells:6} {'one' if lost else '-':>5} {row['requests']:9} {row['on_time']:8.4f}"
                    f" {row['behind']:13.4f} {row['mean_s']:8.2f} {row['p95_s']:8.2f} {row['tick_ms']:11.2f}"
                    f" {row['took_s']:5.0f} s",
                    flush=True,
                )
                rows.append(row)
    return rows


def _draw_arrivals(options: argparse.Namespace, times: CostModel, load: float) -> list[TimedRequest]:
    mix = load_mix(options.mix)
    rate_per_s = mix.rate_per_s * load / load_figure(mix, times, options.gpus)
    times_s = draw_poisson(rate_per_s, options.seconds, options.seed)
    return set_deadlines(make_arrivals(draw(mix, times_s, options.seed), times.models), times, mix.slo_scale)


def _measure_row(
    arrivals: Sequence[TimedRequest], setup: SimulationSetup, cells: int, lost: bool, options: argparse.Namespace
) -> dict[str, Any]:
    began_s = time.perf_counter()
    losses = (CellLoss(options.seconds / 2, 0),) if lost else ()
    result = simulate_cells(arrivals, setup, cells, losses)
    latencies_s = [request.latency_s for request in result.requests if request.latency_s is not None]
    return {
        "cells": cells,
        "lost_cells": int(lost),
        "requests": len(result.requests),
        "failed": len(result.requests) - len(latencies_s),
        "retries": result.counts.retries,
        "on_time": round(result.attainment, 4),
        "mean_s": round(sum(latencies_s) / len(latencies_s), 3) if latencies_s else math.nan,
        "p95_s": round(compute_percentile(latencies_s, 95) or math.nan, 3),
        "ticks": result.counts.ticks,
        "tick_ms": round(1000 * result.counts.solve_seconds / result.counts.ticks, 2),
        "took_s": round(time.perf_counter() - began_s, 3),
    }


def _parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=parse_whole_number, default=16_384, help="GPUs of the cluster, in nodes of 8")
    parser.add_argument(
        "--cells",
        nargs="+",
        type=parse_whole_number,
        default=[1, 4, 16],
        help="numbers of cells; ratios are to the first",
    )
    parser.add_argument("--lose", action="store_true", help="measure the loss of a cell too")
    parser.add_argument("--mix", default="flux.1-dev-medium", help="a mix by its name, or a .yaml file")
    parser.add_argument(
        "--loads",
        nargs="+",
        type=make_positive(float),
        default=[0.8, 1.0],
        help="GPU-seconds wanted over those there are",
    )
    parser.add_argument("--seconds", type=make_positive(float), default=300.0, help="seconds in which requests arrive")
    parser.add_argument("--solve-time-s", type=parse_not_negative, default=0.05, help="seconds that every tick costs")
    parser.add_argument("--policy", type=parse_policy_name, default=DEFAULT_POLICY)
    parser.add_argument("--profiles", default=PROFILES, help="a profile table that comes with TridentServe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_quick(gpus=32, cells=[1, 2], loads=[0.8], seconds=60.0, lose=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
