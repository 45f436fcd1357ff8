"""Replays a trace in the simulator, on a cluster that need not exist."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import NoReturn

from tqdm import tqdm

from deployments.assembly.options import format_options
from deployments.assembly.simulation import (
    SimulationSetup,
    assemble_simulation,
    load_times,
    make_cluster_options,
    set_deadlines,
)
from dispatch.options import DEFAULT_POLICY
from dispatch.policies import find_policy
from dispatch.solver.ilp import is_cut_short
from placement.cluster_file import read_cluster
from traces.requests import TraceRequest
from traces.results import ReplayResult
from traces.simulated import check_profiled, make_arrivals, make_results
from tridentserve.engine.simulated import SimulationOptions, SimulationResult


def run(arguments: argparse.Namespace, requests: list[TraceRequest]) -> list[ReplayResult]:
    """The results of all requests. Raises `TridentServeError` for what cannot be simulated."""
    policy = arguments.policy or DEFAULT_POLICY
    find_policy(policy)  # raises for an unknown one, before anything is read
    cluster = read_cluster(arguments.simulate)
    make_times = load_times(cluster, arguments.profiles)
    times = make_times()
    arrivals = make_arrivals(requests, times.models, arguments.model, arguments.speed)
    check_profiled(arrivals, times)
    if arguments.decision_log is not None:
        arguments.decision_log.parent.mkdir(parents=True, exist_ok=True)
    # Delayed: no bar stands above a message of bad usage.
    with tqdm(total=len(requests), unit="req", mininterval=0.2, delay=0.2, file=sys.stderr) as bar:
        options = make_cluster_options(cluster, policy)
        if arguments.solve_limit_s is not None:
            options = replace(options, dispatch=replace(options.dispatch, time_limit_s=arguments.solve_limit_s))
        engine = SimulationOptions(
            jitter=arguments.jitter,
            seed=arguments.seed,
            keep_plans=True,
            decision_log=arguments.decision_log,
            on_progress=lambda now_s, ended: _show(bar, now_s, ended),
        )
        began_s = time.perf_counter()
        due = set_deadlines(arrivals, times)
        simulation = assemble_simulation(
            due, SimulationSetup(cluster.list_workers(), make_times, options, engine=engine)
        )
        result = simulation.engine.run(due)
    written = json.dumps(simulation.describe(), indent=2)
    (arguments.out / "options.json").write_text(f"{written}\n", encoding="utf-8")
    print(format_options(options), file=sys.stderr)
    _print_summary(result, cluster.gpu, time.perf_counter() - began_s)
    return make_results(requests, result)


def _show(bar: tqdm[NoReturn], now_s: float, ended: int) -> None:
    bar.set_postfix(simulated=f"{now_s:.0f}s", refresh=False)
    bar.update(ended - bar.n)


def _print_summary(result: SimulationResult, gpu: str, wall_s: float) -> None:
    counts = result.counts
    print(
        f"simulated {result.duration_s:.0f} s of {result.num_workers} {gpu} in {wall_s:.1f} s: {counts.plans} plans, "
        f"{counts.switches} changes of placement, {result.utilisation:.0%} busy",
        file=sys.stderr,
    )
    if counts.failed_ticks:
        print(
            f"the policy failed in {counts.failed_ticks} of {counts.ticks} ticks; see the errors above", file=sys.stderr
        )
    cut_short = sum(number for found_by, number in counts.methods.items() if is_cut_short(found_by))
    if cut_short:
        print(
            f"{cut_short} decisions came of solves that hit their time limit: another run may decide otherwise there; "
            "a larger --solve-limit-s avoids that",
            file=sys.stderr,
        )
