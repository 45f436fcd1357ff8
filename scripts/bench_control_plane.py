#!/usr/bin/env python3
"""The requests a second that one Scheduler can manage, measured without a GPU.

The scheduler, the engine and the HTTP application are the real ones, in processes of their own; the workers take the
times of the profile (L20) without computing, many in one process. Requests of the medium mix of a model come in an open
loop, at one rate after the other, until their mean latency leaves that of the simulator, which serves the same trace,
by more than --within; then the next number of workers is measured. Clients call the HTTP application in its own
process: what Ray Serve adds (its proxy and its replicas, about 4 ms of CPU each), `bench_requests.py` measures. Each
rate is a share of what the workers can do, or what --rates says. The last line is one JSON object.

Example: python scripts/bench_control_plane.py --workers 64 512 2048
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, make_positive, parse_whole_number
from lib.control_plane.clients import Answer, ClientProcess
from lib.control_plane.cluster import Truth
from lib.control_plane.logical_workers import start_hosts
from lib.control_plane.service import ControlPlaneScheduler
from lib.ray_cluster import run_ray_cluster

from traces.reports.report import compute_percentile
from traces.workloads.mixes import load_mix
from tridentserve.engine.simulated import SimulationResult, TimedRequest

_FAMILIES = {"sd3-medium": "sd3", "flux.1-dev": "flux"}
# Shares of what the workers can do, where no rates are given.
_LOADS = (0.25, 0.5, 0.7, 0.8, 0.9)
# Time from the start of the processes' clocks to the first request.
_LEAD_S = 0.5
_WARM_UP_S = 3.0
_LOGICAL_CPUS = 8


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse_arguments(argv)
    run = describe_run(f"{options.clients} client processes, {options.hosts} of workers", libraries=("ray",))
    rows = []
    with run_ray_cluster(_LOGICAL_CPUS, os.environ.get("RAY_ADDRESS")):
        for truth in (Truth(options.model, num, steps) for num in options.workers for steps in options.steps):
            rows += asyncio.run(_measure_cluster(options, truth))
    within = {
        str(num): max((row["offered_per_s"] for row in rows if row["workers"] == num and row["within"]), default=0.0)
        for num in options.workers
    }
    print_result(
        run,
        {
            "model": options.model,
            "seconds": options.seconds,
            "streamed": options.stream,
            "rows": rows,
            "most_offered_per_s": within,
        },
    )
    return 1 if any(row["failed"] for row in rows) else 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="bench_control_plane", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", type=parse_whole_number, nargs="+", default=[64, 512, 2048], help="(default %(default)s)"
    )
    parser.add_argument("--model", choices=_FAMILIES, default="sd3-medium", help="whose mix (default %(default)s)")
    parser.add_argument(
        "--steps",
        type=parse_whole_number,
        nargs="+",
        default=[None],
        help="denoising steps, one number after the other (default: those of the mix)",
    )
    parser.add_argument("--rates", type=make_positive(float), nargs="+", help="requests a second, lowest first")
    parser.add_argument("--seconds", type=make_positive(float), default=30.0, help="of each rate (default %(default)s)")
    parser.add_argument("--clients", type=parse_whole_number, default=1, help="their processes (default %(default)s)")
    parser.add_argument("--hosts", type=parse_whole_number, default=1, help="workers' processes (default %(default)s)")
    parser.add_argument("--within", type=make_positive(float), default=0.1, help="(default %(default)s)")
    parser.add_argument("--output-kb", type=parse_whole_number, default=64, help="of each image (default %(default)s)")
    parser.add_argument("--stream", action="store_true", help="clients stream the progress of their requests")
    parser.add_argument("--profile", action="store_true", help="print where the Scheduler's CPU time goes")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals (default %(default)s)")
    parser.add_quick(workers=[8], rates=[1.0], seconds=3.0, steps=[4])
    return parser.parse_args(argv)


async def _measure_cluster(options: argparse.Namespace, truth: Truth) -> list[dict[str, Any]]:
    mix = load_mix(f"{options.model}-medium")
    most_per_s = mix.rate_per_s / mix.load * truth.num_workers / mix.num_gpus
    rates = options.rates or [share * most_per_s for share in _LOADS]
    service = await _ControlPlane.start(options, truth, truth.draw_arrivals(max(rates), options.seconds, options.seed))
    print(
        f"{truth.num_workers} workers started in {service.started_s:.1f} s\n"
        f"{'offered':>8} {'done/s':>7}  mean and P95 latency, simulated   ratio  CPU ms a request",
        flush=True,
    )
    rows = []
    try:
        for rate_per_s in rates:
            rows.append(await service.measure(rate_per_s))
            if not rows[-1]["within"]:
                break
    finally:
        service.stop()
    return rows


@dataclass(slots=True)
class _ControlPlane:
    """The processes of one cluster."""

    options: argparse.Namespace
    truth: Truth
    scheduler: Any
    clients: list[Any]
    hosts: list[Any]
    started_s: float = 0.0
    runs: int = 0
    simulated: dict[float, SimulationResult] = field(default_factory=dict)
    """By rate: a rate that comes again, to see whether anything grows, has the same arrivals."""

    @classmethod
    async def start(cls, options: argparse.Namespace, truth: Truth, arrivals: Sequence[TimedRequest]) -> _ControlPlane:
        hosts = start_hosts(options.hosts, truth, options.output_kb * 1024)
        scheduler: Any = ray.remote(ControlPlaneScheduler)
        client: Any = ray.remote(ClientProcess)
        scheduler = scheduler.options(num_cpus=0, max_concurrency=1000).remote(truth)
        started_s = await scheduler.start.remote(list(arrivals), hosts)
        family = _FAMILIES[options.model]
        clients = [
            client.options(num_cpus=0, max_concurrency=100).remote(scheduler, options.model, family)
            for _ in range(options.clients)
        ]
        service = cls(options, truth, scheduler, clients, hosts, started_s)
        await service._send(truth.draw_arrivals(1.0 / _WARM_UP_S, 3 * _WARM_UP_S, options.seed)[:3], "warm")
        return service

    def stop(self) -> None:
        for actor in (*self.clients, self.scheduler, *self.hosts):
            ray.kill(actor)

    async def measure(self, rate_per_s: float) -> dict[str, Any]:
        options = self.options
        arrivals = self.truth.draw_arrivals(rate_per_s, options.seconds, options.seed)
        if rate_per_s not in self.simulated:
            self.simulated[rate_per_s] = await asyncio.to_thread(self.truth.simulate, arrivals)
        simulated = self.simulated[rate_per_s]
        if options.profile:
            await self.scheduler.begin_profile.remote()
        before, began_s = await self._read_usage(), time.perf_counter()
        answers = await self._send(arrivals, f"{self.runs}")
        seconds, after = time.perf_counter() - began_s - _LEAD_S, await self._read_usage()
        self.runs += 1
        if options.profile:
            print(await self.scheduler.end_profile.remote())
        row = _make_row(self.truth, rate_per_s, answers, simulated, seconds, options.within)
        row["cpu_ms"] = {kind: round(1000 * (after[kind][0] - before[kind][0]) / len(answers), 3) for kind in before}
        grown = after["scheduler"][1] - before["scheduler"][1]
        row["scheduler_bytes_per_request"] = round(grown / len(answers))
        row["scheduler_mb"] = round(after["scheduler"][1] / 2**20, 1)
        _show(row)
        return row

    async def _send(self, arrivals: Sequence[TimedRequest], label: str) -> list[Answer]:
        """Send these requests, each process of clients its share."""
        named = [(at_s, replace(spec, request_id=f"{label}-{number}")) for number, (at_s, spec) in enumerate(arrivals)]
        begin_s = time.time() + _LEAD_S
        shares = [named[index :: len(self.clients)] for index in range(len(self.clients))]
        calls = [
            client.send.remote(share, begin_s, self.options.stream)
            for client, share in zip(self.clients, shares, strict=True)
        ]
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    async def _read_usage(self) -> dict[str, tuple[float, int]]:
        """CPU seconds and resident bytes of each kind of process."""
        kinds = {"scheduler": [self.scheduler], "api": self.clients, "workers": self.hosts}
        usage = {}
        for kind, actors in kinds.items():
            figures = await asyncio.gather(*(actor.read_usage.remote() for actor in actors))
            usage[kind] = (sum(cpu_s for cpu_s, _ in figures), sum(num_bytes for _, num_bytes in figures))
        return usage


def _make_row(
    truth: Truth,
    rate_per_s: float,
    answers: Sequence[Answer],
    simulated: SimulationResult,
    seconds: float,
    within: float,
) -> dict[str, Any]:
    good = [answer for answer in answers if answer.error is None]
    failed = [answer.error for answer in answers if answer.error is not None]
    if failed:
        print(f"{len(failed)} requests failed: {failed[0]}", file=sys.stderr)
    live_s = [answer.latency_s for answer in good]
    expected_s = [result.latency_s for result in simulated.requests if result.latency_s is not None]
    queue_ms = [1000 * answer.queue_s for answer in good if answer.queue_s is not None]
    late_ms = [1000 * answer.late_s for answer in answers]
    ratio = fmean(live_s) / fmean(expected_s) if live_s and expected_s else float("nan")
    return {
        "workers": truth.num_workers,
        "steps": truth.num_steps,
        "offered_per_s": round(rate_per_s, 2),
        "requests_per_s": round(len(good) / seconds, 2),
        "requests": len(answers),
        "failed": len(failed),
        "mean_s": _round(fmean(live_s) if live_s else None),
        "p95_s": _round(compute_percentile(live_s, 95)),
        "simulated_mean_s": _round(fmean(expected_s) if expected_s else None),
        "simulated_p95_s": _round(compute_percentile(expected_s, 95)),
        "latency_ratio": round(ratio, 4),
        "within": bool(ratio <= 1 + within and not failed),
        "queue_p50_ms": _round(compute_percentile(queue_ms, 50)),
        "sent_late_p99_ms": _round(compute_percentile(late_ms, 99)),
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _show(row: dict[str, Any]) -> None:
    cpu = "  ".join(f"{kind} {value:.2f}" for kind, value in row["cpu_ms"].items())
    print(
        f"{row['offered_per_s']:>8.1f} {row['requests_per_s']:>7.1f}  {row['mean_s']} {row['p95_s']}, "
        f"{row['simulated_mean_s']} {row['simulated_p95_s']}  {row['latency_ratio']:.3f}  {cpu}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
