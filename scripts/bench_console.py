#!/usr/bin/env python3
"""Costs of open consoles for the requests of a service: latency of images with and without many event streams.

The service is a whole one with the workers and the placement of deployments/tiny.yaml, and one replica of Api. One
client asks for images, one after another: by turns while nobody watches, and while `--consoles` streams of the live
state of the cluster are open, read by this process. The order of the two changes from round to round. Told apart is
the CPU time of Api, the proxy and the Scheduler in a second, which says more than the latency where other programs
use the machine. Linux only. The last line is one JSON object.

Example: python scripts/bench_console.py --consoles 200 --rounds 10
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import yaml
from lib.bench.cpu_times import PROCESS_KINDS, read_cpu_seconds
from lib.bench.figures import compute_median_ms
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, parse_whole_number
from lib.local_service import run_local_service

from deployments.config.app import AppArgs

_TINY = Path(__file__).parent.parent / "deployments" / "tiny.yaml"
_EVENTS = "/v1/cluster/events"
_OPEN_S = 60.0


@dataclass
class ConsoleTurns:
    """The measures of all rounds while a number of consoles were open."""

    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PROCESS_KINDS, 0.0))
    num_bytes: int = 0
    num_events: int = 0


class _Reader(asyncio.Protocol):
    """One open console: counts what comes, and looks at nothing."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.num_bytes = self.num_events = 0
        self.has_state = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self.num_events += data.count(b"event: ")
        if self.num_events and not self.has_state.done():
            self.has_state.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.has_state.done():
            self.has_state.set_exception(ConnectionError("the service has closed the stream of a console"))


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse_arguments(argv)
    (app,) = yaml.safe_load(_TINY.read_text())["applications"]
    run = describe_run(f"{options.consoles} consoles", libraries=("ray", "torch"))
    with nullcontext(options.url) if options.url else run_local_service(AppArgs.model_validate(app["args"])) as url:
        turns = asyncio.run(_measure_all(url, options))
    print_result(run, {"consoles": options.consoles, **_summarize(turns)})
    return 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="bench_console", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--consoles", type=parse_whole_number, default=200, help="open consoles (default %(default)s)")
    parser.add_argument("--rounds", type=parse_whole_number, default=10, help="rounds (default %(default)s)")
    parser.add_argument(
        "--requests", type=parse_whole_number, default=8, help="requests of each turn (default %(default)s)"
    )
    parser.add_argument("--steps", type=parse_whole_number, default=20, help="denoising steps (default %(default)s)")
    parser.add_argument("--side", type=parse_whole_number, default=256, help="of the images (default %(default)s)")
    parser.add_argument("--url", help="one of deployments/tiny.yaml that runs here already; without it one is started")
    parser.add_quick(consoles=20, rounds=1, requests=3, steps=2, side=64)
    return parser.parse_args(argv)


async def _measure_all(url: str, options: argparse.Namespace) -> dict[bool, ConsoleTurns]:
    turns = {False: ConsoleTurns(), True: ConsoleTurns()}
    # Not through a proxy of the environment: the service is on this machine.
    async with httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False) as client:
        await _ask(client, options, 0)
        for number in range(options.rounds):
            for watched in (False, True) if number % 2 == 0 else (True, False):
                await _measure(client, url, options, turns[watched], watched)
            medians = [compute_median_ms(turns[watched].latencies_s) for watched in (False, True)]
            print(f"round {number + 1}: {medians[0]} ms without consoles, {medians[1]} ms with", flush=True)
    return turns


async def _measure(
    client: httpx.AsyncClient, url: str, options: argparse.Namespace, turn: ConsoleTurns, watched: bool
) -> None:
    async with _open_consoles(url, options.consoles if watched else 0) as readers:
        bytes_before, events_before = _count(readers)
        cpu_before, began_s = read_cpu_seconds(), time.perf_counter()
        for number in range(options.requests):
            turn.latencies_s.append(await _ask(client, options, number))
        turn.seconds += time.perf_counter() - began_s
        cpu_after = read_cpu_seconds()
        for kind in PROCESS_KINDS:
            turn.cpu_s[kind] += cpu_after.get(kind, 0.0) - cpu_before.get(kind, 0.0)
        num_bytes, num_events = _count(readers)
        turn.num_bytes += num_bytes - bytes_before
        turn.num_events += num_events - events_before


async def _ask(client: httpx.AsyncClient, options: argparse.Namespace, seed: int) -> float:
    """The seconds of one request."""
    size = f"{options.side}x{options.side}"
    body = {"prompt": "a lighthouse", "size": size, "num_inference_steps": options.steps, "seed": seed}
    began_s = time.perf_counter()
    (await client.post("/v1/images/generations", json=body)).raise_for_status()
    return time.perf_counter() - began_s


@asynccontextmanager
async def _open_consoles(url: str, count: int) -> AsyncIterator[list[_Reader]]:
    """So many streams, each of which has had the whole state."""
    address = urlsplit(url)
    host = address.hostname or "127.0.0.1"
    head = f"GET {address.path.rstrip('/')}{_EVENTS} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode()
    loop, opened = asyncio.get_running_loop(), []
    try:
        for _ in range(count):
            opened.append(await loop.create_connection(lambda: _Reader(head), host, address.port or 80))
        async with asyncio.timeout(_OPEN_S):
            await asyncio.gather(*(reader.has_state for _, reader in opened))
        yield [reader for _, reader in opened]
    finally:
        for transport, _ in opened:
            transport.abort()


def _count(readers: Sequence[_Reader]) -> tuple[int, int]:
    return sum(reader.num_bytes for reader in readers), sum(reader.num_events for reader in readers)


def _summarize(turns: dict[bool, ConsoleTurns]) -> dict[str, Any]:
    alone, watched = turns[False], turns[True]
    figures: dict[str, Any] = {
        "requests": len(alone.latencies_s),
        "latency_ratio": round(statistics.median(watched.latencies_s) / statistics.median(alone.latencies_s), 4),
        "mean_latency_ratio": round(statistics.fmean(watched.latencies_s) / statistics.fmean(alone.latencies_s), 4),
        "events_per_s": round(watched.num_events / watched.seconds, 2),
        "bytes_per_s": round(watched.num_bytes / watched.seconds, 1),
    }
    for name, turn in (("alone", alone), ("watched", watched)):
        cpu = {kind: round(1000 * turn.cpu_s[kind] / turn.seconds, 2) for kind in PROCESS_KINDS}
        figures[name] = {"p50_ms": compute_median_ms(turn.latencies_s), "cpu_ms_per_s": cpu}
    return figures


if __name__ == "__main__":
    sys.exit(main())
