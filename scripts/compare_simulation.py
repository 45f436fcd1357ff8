#!/usr/bin/env python3
"""Compares the simulator with a live service: both serve the same three traces.

Start the service first, on an otherwise idle machine (for another port, copy the configuration):

    python scripts/serve.py deployments/tiny.yaml
    python scripts/compare_simulation.py --config deployments/tiny.yaml --url http://127.0.0.1:8000

Warm-up requests tell what stages and overheads cost on this machine, and how much workers slow each other down; they
are sent before and after each trace, as machines drift. The traces are replayed live, and then simulated with the
workers, placement and scheduler of the configuration. Nothing is fitted to the traces. Reports of all runs go to --out.
The last line is one JSON object. Exit status: 0 when both served all requests, 1 when one failed, 2 for bad usage,
130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, make_positive, parse_sides, parse_whole_number
from lib.compare.calibration import Calibration, apply_measured, calibrate, compute_hurry_ms
from lib.compare.samples import StagePoint, list_stage_samples
from lib.compare.warm_up import WarmUp, WarmUpClient
from lib.compare.workload import limit_to_cores, make_traces
from tqdm import tqdm

from deployments.assembly.planning import list_service_workers, make_placement
from deployments.assembly.profiles import load_served_tables
from deployments.assembly.service_times import make_service_times, share_service_stages
from deployments.assembly.simulation import simulate_service
from deployments.config.app import AppArgs
from deployments.config.file import read_args
from profiler import CostModel
from traces.client.replay import replay
from traces.reports.report import compute_percentile, write_report
from traces.requests import TraceRequest
from traces.results import ReplayResult
from traces.simulated import make_arrivals, make_results
from tridentserve.errors import TridentServeError
from tridentserve.requests import Shape
from tridentserve.stages import Stage

_CLOSE = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse_arguments(argv)
    try:
        args = limit_to_cores(read_args(options.config))
        if options.profile is not None:
            _profile(args, options)
            options.profiles = [str(options.profile)]
        if options.profiles is not None:
            args = args.model_copy(update={"profiles": options.profiles})
        _check(args, options)
        return _compare(args, options)
    except (TridentServeError, OSError, subprocess.CalledProcessError) as error:
        print(f"compare_simulation: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare_simulation: interrupted; nothing was compared", file=sys.stderr)
        return 130


def _check(args: AppArgs, options: argparse.Namespace) -> None:
    """Fail now rather than after minutes of warm-up, for sides in no table and a directory that is not writable."""
    model, shapes = args.models[0].name, [Shape(side, side) for side in options.sides]
    apply_measured(
        load_served_tables(args), {StagePoint(model, stage, shape, 1): 1.0 for stage in Stage for shape in shapes}
    )
    options.out.mkdir(parents=True, exist_ok=True)


def _compare(args: AppArgs, options: argparse.Namespace) -> int:
    run = describe_run()
    traces, lives, warm_ups = _serve(args, options)
    rows, failed, times = [], 0, make_service_times(args)
    for (name, requests), live, before, after in zip(traces.items(), lives, warm_ups, warm_ups[1:], strict=False):
        _observe(times, before)
        # Machines drift (clocks, neighbours): what holds during a trace is taken from before and after it.
        others = [each for each in warm_ups if each is not before and each is not after]
        calibration = calibrate([before, after], len(list_service_workers(args)), others)
        _show(name, calibration)
        measured = apply_measured(load_served_tables(args), calibration.stage_s)
        truth = share_service_stages(args, CostModel(measured, args.cluster.device_name))
        simulated = _replay_simulated(args, requests, times, truth, calibration, options.seed)
        for way, results in (("live", live), ("simulated", simulated)):
            write_report(options.out / f"{name}-{way}", results, service=way)
            failed += sum(result.error is not None for result in results)
        rows.append(_make_row(name, requests, live, simulated))
    _print(rows)
    print_result(run, {"config": str(options.config), "load": options.load, "rows": rows, "within": _is_close(rows)})
    return 1 if failed else 0


def _serve(
    args: AppArgs, options: argparse.Namespace
) -> tuple[dict[str, list[TraceRequest]], list[list[ReplayResult]], list[WarmUp]]:
    """The traces by name, what the live service made of each, and the warm-ups before, between and after them."""
    warm_ups = [_warm_up(args, options)]
    traces = make_traces(
        args.models[0].name,
        options.sides,
        options.steps,
        options.requests,
        options.load,
        _count_diffuse_workers(args),
        calibrate(warm_ups, len(list_service_workers(args))),
        options.seed,
    )
    lives = []
    for name, requests in traces.items():
        lives.append(_replay_live(requests, options.url, name))
        warm_ups.append(_warm_up(args, options))
    for number, warm_up in enumerate(warm_ups):
        write_report(options.out / f"warm-up-{number}", warm_up.everything, service="live")
    return traces, lives, warm_ups


def _warm_up(args: AppArgs, options: argparse.Namespace) -> WarmUp:
    model, num_workers, learning = args.models[0].name, len(list_service_workers(args)), make_service_times(args)

    def compute_slo_ms(answers: Sequence[ReplayResult]) -> dict[int, float]:
        _learn(learning, answers)
        return compute_hurry_ms(learning, model, options.sides, options.steps)

    total = WarmUpClient.count_requests(options.sides, options.rounds, num_workers)
    with tqdm(total=total, desc="warm-up", file=sys.stderr) as bar:
        client = WarmUpClient(options.url, model, options.sides, options.steps, options.rounds, lambda: _count(bar))
        return asyncio.run(client.run(num_workers, compute_slo_ms))


def _observe(times: CostModel, warm_up: WarmUp) -> None:
    """The live scheduler has seen the warm-up too."""
    _learn(times, warm_up.everything)


def _learn(times: CostModel, results: Sequence[ReplayResult]) -> None:
    for sample in sorted(list_stage_samples(results), key=lambda sample: sample.end_s):
        times.observe(*sample.point, 1, sample.seconds)


def _count_diffuse_workers(args: AppArgs) -> int:
    """Most workers that denoise at once, by the start placement."""
    workers = list_service_workers(args)
    placement = make_placement(args, make_service_times(args), workers)
    holders = sum(any(replica.stage is Stage.DIFFUSE for replica in held) for held in placement.replicas.values())
    return min(holders, args.cluster.nodes * (workers[0].max_denoising or holders))


def _replay_live(requests: list[TraceRequest], url: str, name: str) -> list[ReplayResult]:
    with tqdm(total=len(requests), desc=name, unit="req", file=sys.stderr) as bar:
        return asyncio.run(replay(requests, url, on_done=lambda _: _count(bar)))


def _count(bar: tqdm[NoReturn]) -> None:
    bar.update()


def _replay_simulated(
    args: AppArgs,
    requests: list[TraceRequest],
    times: CostModel,
    truth: CostModel,
    calibration: Calibration,
    seed: int,
) -> list[ReplayResult]:
    """The simulated results, with the time that a client needs to send the request and receive the answer."""
    arrivals = make_arrivals(requests, times.models)
    results = make_results(requests, simulate_service(args, times, truth, arrivals, calibration.make_options(seed)))
    return [
        replace(result, latency_s=result.latency_s + calibration.http_s[Shape(r.height, r.width, r.num_frames)])
        for result, r in zip(results, requests, strict=True)
    ]


def _make_row(
    name: str, requests: list[TraceRequest], live: list[ReplayResult], simulated: list[ReplayResult]
) -> dict[str, Any]:
    row: dict[str, Any] = {"trace": name, "requests": len(requests)}
    figures = {}
    for way, results in (("live", live), ("simulated", simulated)):
        latencies = [result.latency_s for result in results if result.error is None]
        figures[way] = (
            (fmean(latencies), compute_percentile(latencies, 95) or 0.0) if latencies else (math.nan, math.nan)
        )
    for index, figure in enumerate(("mean", "p95")):
        real_s, simulated_s = figures["live"][index], figures["simulated"][index]
        row |= {f"live_{figure}_s": round(real_s, 4), f"simulated_{figure}_s": round(simulated_s, 4)}
        row[f"{figure}_ratio"] = round(simulated_s / real_s, 4)
    return row


def _is_close(rows: list[dict[str, Any]]) -> bool:
    return all(abs(row[f"{figure}_ratio"] - 1) <= _CLOSE for row in rows for figure in ("mean", "p95"))


def _show(name: str, calibration: Calibration) -> None:
    print(f"{name}, by what was measured before and after it")
    stages = ", ".join(
        f"{stage} {shape}{f' by {degree}' if degree > 1 else ''} {seconds * 1000:.1f}"
        for (_, stage, shape, degree), seconds in sorted(calibration.stage_s.items())
    )
    print(f"stages, ms: {stages}")
    http = ", ".join(f"{shape} {seconds * 1000:.1f}" for shape, seconds in calibration.http_s.items())
    print(
        f"overheads, ms: plan {calibration.plan_overhead_s * 1000:.1f}, report "
        f"{calibration.report_overhead_s * 1000:.1f}, image {calibration.image_s_per_pixel * 1e9:.1f} a megapixel; "
        f"HTTP {http}"
    )
    for about, factors in (("", calibration.slowdown), (" of wide plans", calibration.wide_slowdown)):
        print(f"slowdown{about} with 1, 2, ... at once: {', '.join(f'{factor:.2f}' for factor in factors)}")
    print(f"jitter {calibration.jitter:.3f}")


def _print(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'trace':10} {'mean live':>10} {'simulated':>10} {'ratio':>6} {'P95 live':>10} {'simulated':>10} {'ratio':>6}"
    )
    for row in rows:
        cells = (
            f"{row[f'live_{figure}_s']:10.3f} {row[f'simulated_{figure}_s']:10.3f} {row[f'{figure}_ratio']:6.3f}"
            for figure in ("mean", "p95")
        )
        print(f"{row['trace']:10} {' '.join(cells)}")
    print(f"mean and P95 within {_CLOSE:.0%}: {'yes' if _is_close(rows) else 'no'}")


def _profile(args: AppArgs, options: argparse.Namespace) -> None:
    """Measure the sizes of the comparison into the table --profile names."""
    served = args.models[0]
    source = str(served.path) if served.path is not None else f"tiny-{served.tiny}"
    degrees = [k for k in (1, 2, 4, 8) if k <= (args.dispatch.max_degree or args.cluster.workers_per_node)]
    command = [
        sys.executable,
        str(Path(__file__).with_name("profile_model.py")),
        source,
        "--name",
        served.profile_as or served.name,
    ]
    command += ["--out", str(options.profile), "--sizes", ",".join(map(str, options.sides))]
    command += ["--degrees", ",".join(map(str, degrees)), "--threads", str(args.cluster.cpu_threads)]
    subprocess.run([*command, "--device", args.cluster.device, "--cache-dir", str(args.cache_dir)], check=True)


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="compare_simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="the Serve config file that the service runs with")
    parser.add_argument("--url", required=True, help="address of the service; requests are for its first model")
    profiles = parser.add_mutually_exclusive_group()
    profiles.add_argument("--profiles", nargs="+", metavar="P", help="tables instead of those of the configuration")
    profiles.add_argument("--profile", type=Path, metavar="CSV", help="measure the sizes first, into this table")
    parser.add_argument(
        "--sides", type=parse_sides, default="256,384,512", help="three sides in pixels (default %(default)s)"
    )
    parser.add_argument(
        "--steps", type=parse_whole_number, default=10, help="denoising steps of every request (default %(default)s)"
    )
    parser.add_argument(
        "--requests", type=parse_whole_number, default=100, help="requests of each trace (default %(default)s)"
    )
    parser.add_argument(
        "--load", type=make_positive(float), default=0.5, help="share of what the workers can do (default %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=parse_whole_number, default=5, help="warm-up requests of each size (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the traces (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/comparison"), metavar="DIR", help="directory for the reports"
    )
    parser.add_quick(sides=[64, 128, 256], steps=2, requests=3, rounds=1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
