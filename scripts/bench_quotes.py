#!/usr/bin/env python3
"""Measures how good predictions of the end of requests are: those that the scheduler makes when a request arrives, as
`POST /v1/quotes` would answer them at that moment, beside the time from arrival to result.

Simulated, each mix is served by the default policy on nodes of 8 GPUs, with Poisson arrivals at `--load` times what
the GPUs can do by the profile at degree 1. Live, the service of `--config` is started, or with `--url` one is asked
that runs here; clients ask it for images of its first model as fast as it answers, which says how much it can do, and
then a Poisson trace at `--load` times that is replayed. The first fifth of each run is not counted: predictions learn
from requests that have ended. An error is |predicted - actual| / actual. Seeds below 1,000 are for tuning. The last
line is one JSON object.

Example: python scripts/bench_quotes.py --seed 10000
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
from lib.benchmark import describe_run, print_result
from lib.command_line import PROFILES, Parser, make_positive, parse_not_negative, parse_sides, parse_whole_number
from lib.evaluate.cells import make_paper_cluster

from deployments.assembly.simulation import (
    SimulationSetup,
    assemble_simulation,
    load_times,
    make_cluster_options,
    set_deadlines,
)
from deployments.config.file import read_args
from profiler import read_shipped_table
from traces.client.replay import ReplaySession, open_session, replay
from traces.reports.report import compute_percentile
from traces.requests import TraceRequest
from traces.simulated import make_arrivals
from traces.workloads.arrivals import draw_arrival_times
from traces.workloads.mixes import Mix, MixShape, draw, load_figure, load_mix
from tridentserve.engine.simulated import SimulationOptions
from tridentserve.errors import TridentServeError
from tridentserve.scheduling.scheduler import SchedulerOptions

_QUICKSTART = Path(__file__).parent.parent / "deployments" / "quickstart.yaml"
_WARM_UP = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse_arguments(argv)
    run = describe_run(f"seed {options.seed}", libraries=("ray", "torch"))
    print(
        f"{'way':<10} {'load of':<22} {'quotes':>6} {'median':>7} {'p90':>7} {'<= 10 %':>8} {'<= 30 %':>8} {'ratio':>6}"
    )
    try:
        rows = [_measure_simulated(mix, options) for mix in options.mixes] if "simulated" in options.ways else []
        if "live" in options.ways:
            rows.append(_measure_live(options))
    except (OSError, httpx.HTTPError, TridentServeError) as error:
        print(f"bench_quotes: {error}", file=sys.stderr)
        return 2
    print_result(run, {"load": options.load, "seed": options.seed, "rows": rows})
    return 0


def _measure_simulated(name: str, options: argparse.Namespace) -> dict[str, Any]:
    table, mix = read_shipped_table(PROFILES), load_mix(name)
    cluster = make_paper_cluster(options.gpus, table.rows[0].gpu)
    make_times = load_times(cluster, [table])
    times = make_times()
    rate = mix.rate_per_s * options.load / load_figure(mix, times, options.gpus)
    duration_s = options.requests / rate
    requests = draw(mix, list(draw_arrival_times("poisson", rate, duration_s, options.seed, 1.0)), options.seed)
    arrivals = set_deadlines(make_arrivals(requests, times.models), times)
    engine = SimulationOptions(seed=options.seed, jitter=options.jitter)
    shipped = make_cluster_options(cluster, "default")
    service = replace(shipped, scheduler=replace(shipped.scheduler, predict_every_s=options.every_s))
    setup = SimulationSetup(cluster.list_workers(), make_times, service, engine=engine)
    result = assemble_simulation(arrivals, setup).engine.run(arrivals)
    pairs = [(each.predicted_s, each.latency_s) for each in result.requests if each.latency_s is not None]
    return _make_row("simulated", name, len(cluster.list_workers()), pairs)


def _measure_live(options: argparse.Namespace) -> dict[str, Any]:
    if options.url:
        return _ask_service(options.url.rstrip("/"), options)
    # Ray is started by this alone.
    from lib.local_service import run_local_service

    with run_local_service(read_args(options.config)) as url:
        return _ask_service(url, options)


def _ask_service(url: str, options: argparse.Namespace) -> dict[str, Any]:
    model = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
    workers = httpx.get(f"{url}/health").raise_for_status().json()["workers_total"]
    results = asyncio.run(_serve_live(url, model, options))
    pairs = [(each.facts.predicted_s, each.latency_s) for each in results if each.error is None]
    return _make_row("live", model, workers, pairs)


async def _serve_live(url: str, model: str, options: argparse.Namespace) -> list[Any]:
    """The answers to a Poisson trace, after a time in which clients kept the service busy."""
    shapes = tuple(MixShape(height=side, width=side, weight=1.0) for side in options.sides)
    mix = Mix(
        name="live",
        about="a mix of a benchmark",
        model=model,
        num_inference_steps=options.steps,
        rate_per_s=1.0,
        num_gpus=1,
        gpu="cpu",
        load=1.0,
        shapes=shapes,
    )
    busy = draw(mix, [float(number) for number in range(options.live_requests)], options.seed + 1)
    session = await open_session(busy, url, timeout_s=600.0)
    began_s = time.monotonic()
    await _keep_busy(session, busy)
    rate = options.load * len(busy) / (time.monotonic() - began_s)
    times_s: list[float] = []
    duration_s = 2 * options.live_requests / rate
    while len(times_s) < options.live_requests:
        times_s = list(draw_arrival_times("poisson", rate, duration_s, options.seed, 1.0))
        duration_s *= 2
    return await replay(draw(mix, times_s[: options.live_requests], options.seed), url)


async def _keep_busy(session: ReplaySession, requests: Sequence[TraceRequest]) -> None:
    """Six clients, each of which sends its next request when it has the answer to the last."""
    numbers = iter(range(len(requests)))

    async def ask() -> None:
        for number in numbers:
            await session.send(requests[number], session.models[number], number, session.now_s())

    await asyncio.gather(*(ask() for _ in range(6)))


def _make_row(way: str, load_of: str, workers: int, pairs: Sequence[tuple[float | None, float]]) -> dict[str, Any]:
    counted = pairs[int(_WARM_UP * len(pairs)) :]
    known = [(predicted_s, actual_s) for predicted_s, actual_s in counted if predicted_s is not None]
    errors = [abs(predicted_s / actual_s - 1) for predicted_s, actual_s in known]
    ratios = [predicted_s / actual_s for predicted_s, actual_s in known]
    row = {
        "way": way,
        "load_of": load_of,
        "workers": workers,
        "quotes": len(known),
        "error_p50": _round(compute_percentile(errors, 50)),
        "error_p90": _round(compute_percentile(errors, 90)),
        "within_10": _round(sum(error <= 0.1 for error in errors) / len(errors) if errors else None),
        "within_30": _round(sum(error <= 0.3 for error in errors) / len(errors) if errors else None),
        "ratio_p50": _round(compute_percentile(ratios, 50)),
    }
    figures = [row[name] for name in ("error_p50", "error_p90", "within_10", "within_30", "ratio_p50")]
    shown = " ".join("      -" if figure is None else f"{figure:7.3f}" for figure in figures)
    print(f"{way:<10} {load_of:<22} {len(known):>6} {shown}", flush=True)
    return row


def _round(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 4)


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="bench_quotes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=("simulated", "live"), default=["simulated", "live"])
    parser.add_argument(
        "--mixes",
        nargs="+",
        default=["sd3-medium-medium", "flux.1-dev-medium"],
        help="mixes of simulated runs (default %(default)s)",
    )
    parser.add_argument("--gpus", type=parse_whole_number, default=128, help="simulated GPUs (default %(default)s)")
    parser.add_argument(
        "--load", type=make_positive(float), default=0.8, help="share of what the workers can do (default %(default)s)"
    )
    parser.add_argument(
        "--requests", type=parse_whole_number, default=1500, help="requests of a simulated run (default %(default)s)"
    )
    parser.add_argument(
        "--every-s",
        type=parse_not_negative,
        default=SchedulerOptions().predict_every_s,
        help="least seconds between two predictions in simulated runs (default %(default)s, as in a service)",
    )
    parser.add_argument(
        "--jitter",
        type=parse_not_negative,
        default=SimulationOptions().jitter,
        help="relative deviation of simulated stage times (default %(default)s)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=_QUICKSTART,
        help="the Serve config file of the live service (default: deployments/quickstart.yaml)",
    )
    parser.add_argument("--url", help="of a running service, such as http://127.0.0.1:8000, in the place of --config")
    parser.add_argument(
        "--sides", type=parse_sides, default="128,192,256", help="sides of live images (default %(default)s)"
    )
    parser.add_argument(
        "--steps", type=parse_whole_number, default=20, help="denoising steps of live images (default %(default)s)"
    )
    parser.add_argument(
        "--live-requests", type=parse_whole_number, default=150, help="requests of the live run (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals and sizes (default %(default)s)")
    parser.add_quick(gpus=8, requests=40, sides=[64, 128, 192], steps=2, live_requests=12)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
