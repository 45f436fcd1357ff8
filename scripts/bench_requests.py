#!/usr/bin/env python3
"""CPU time of a request in each kind of process of the service, by its number of denoising steps.

The service is a whole one with the workers and the placement of deployments/tiny.yaml. Clients in this process ask
for tiny images, each for its next one when it has the last. Each number of steps is measured without streaming, then
with it. What the processes take while nobody asks is measured too: it is part of the CPU time of a request (the more,
the fewer there are in a second), and told apart as `net`. Linux only: the times are those of /proc, of all Ray
processes on this machine. The last line is one JSON object.

Example: python scripts/bench_requests.py --steps 1 20 50
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import yaml
from lib.bench.cpu_times import PROCESS_KINDS, read_cpu_seconds
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, parse_not_negative, parse_whole_number
from lib.local_service import run_local_service

from deployments.config.app import AppArgs

_TINY = Path(__file__).parent.parent / "deployments" / "tiny.yaml"
_WARM_UP = 8


def main(argv: Sequence[str] | None = None) -> int:
    options, args = _parse_arguments(argv)
    run = describe_run(f"{options.clients} clients", libraries=("ray", "torch"))
    with nullcontext(options.url) if options.url else run_local_service(args) as url:
        idle, rows = asyncio.run(_measure_all(url, options))
    figures = {"clients": options.clients, "requests": options.requests, "idle_ms_per_s": idle, "rows": rows}
    print_result(run, figures)
    return 0


def _parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, AppArgs]:
    parser = Parser(prog="bench_requests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=parse_whole_number, nargs="+", default=[1, 20, 50], help="denoising steps (default %(default)s)"
    )
    parser.add_argument("--clients", type=parse_whole_number, default=16, help="clients (default %(default)s)")
    parser.add_argument(
        "--requests", type=parse_whole_number, default=200, help="requests of each row (default %(default)s)"
    )
    parser.add_argument(
        "--idle-s", type=parse_not_negative, default=10.0, help="seconds without requests (default %(default)s)"
    )
    parser.add_argument("--url", help="one of deployments/tiny.yaml that runs here already; without it one is started")
    parser.add_quick(steps=[1, 2], clients=2, requests=4, idle_s=0.5)
    options = parser.parse_args(argv)
    (app,) = yaml.safe_load(_TINY.read_text())["applications"]
    return options, AppArgs.model_validate(app["args"])


async def _measure_all(url: str, options: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, Any]]]:
    rows = []
    # Not through a proxy of the environment: the service is on this machine.
    async with httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False) as client:
        await _ask_all(client, _WARM_UP, options.clients, steps=1, stream=False)
        idle = await _measure_idle(options.idle_s)
        print(f"idle: {_join(idle)} CPU ms a second")
        print(f"{'steps':>5} {'stream':>6} {'req/s':>6}  CPU ms a request")
        for steps in options.steps:
            for stream in (False, True):
                rows.append(await _measure(client, options, idle, steps, stream))
    return idle, rows


async def _measure_idle(seconds: float) -> dict[str, float]:
    before, began_s = read_cpu_seconds(), time.perf_counter()
    await asyncio.sleep(seconds)
    passed_s, after = time.perf_counter() - began_s, read_cpu_seconds()
    return {kind: round(1000 * (after[kind] - before[kind]) / passed_s, 2) for kind in PROCESS_KINDS}


async def _measure(
    client: httpx.AsyncClient, options: argparse.Namespace, idle: dict[str, float], steps: int, stream: bool
) -> dict[str, Any]:
    before, began_s = read_cpu_seconds(), time.perf_counter()
    await _ask_all(client, options.requests, options.clients, steps, stream)
    seconds, after = time.perf_counter() - began_s, read_cpu_seconds()
    rate = options.requests / seconds
    cpu_ms = {kind: round(1000 * (after[kind] - before[kind]) / options.requests, 2) for kind in PROCESS_KINDS}
    net_ms = {kind: round(cpu_ms[kind] - idle[kind] / rate, 2) for kind in cpu_ms}
    print(f"{steps:>5} {'yes' if stream else 'no':>6} {rate:>6.1f}  {_join(cpu_ms)}; net: {_join(net_ms)}", flush=True)
    return {
        "steps": steps,
        "streamed": stream,
        "requests_per_s": round(rate, 2),
        "cpu_ms": cpu_ms,
        "net_cpu_ms": net_ms,
    }


def _join(figures: dict[str, float]) -> str:
    return "  ".join(f"{kind} {value:.1f}" for kind, value in figures.items())


async def _ask_all(client: httpx.AsyncClient, requests: int, clients: int, steps: int, stream: bool) -> None:
    numbers = iter(range(requests))

    async def ask() -> None:
        for number in numbers:
            body = {"prompt": f"number {number}", "size": "64x64", "num_inference_steps": steps, "seed": number}
            answer = await client.post("/v1/images/generations", json={**body, "stream": stream})
            answer.raise_for_status()
            if stream and b"image_generation.completed" not in answer.content:
                raise SystemExit(f"a stream ended without an image: {answer.text[-300:]}")

    await asyncio.gather(*(ask() for _ in range(clients)))


if __name__ == "__main__":
    sys.exit(main())
