#!/usr/bin/env python3
"""Costs of open consoles for the requests of a service: latency of images with and without many event streams.

The service is a whole one with the workers and the placement of deployments/tiny.yaml, and one replica of Api. One
client asks for small images, one after another for `--turn-s` seconds: by turns while nobody watches, and while
`--consoles` streams of the live state of the cluster are open, read by this process. Small images are the hardest
case: what consoles take of Api is the largest share of them. The order of the two changes from round to round, and a
ratio is that of the two turns of one round, so that what changes slowly on the machine changes both; its interval is
a bootstrap over the rounds. Told apart is the CPU time of Api, the proxy and the Scheduler in a second, which says more
than the latency where other programs use the machine. Linux only. The last line is one JSON object.

Example: python scripts/bench_console.py --consoles 200 --rounds 16 --turn-s 45
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
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
from lib.bench.figures import compute_interval, compute_median_ms, summarize_ms
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, make_positive, parse_not_negative, parse_whole_number
from lib.local_service import run_local_service

from deployments.config.app import AppArgs

_TINY = Path(__file__).parent.parent / "deployments" / "tiny.yaml"
_EVENTS = "/v1/cluster/events"
_OPEN_S = 60.0
# Each event that is compressed ends so, as browsers get them.
_END_OF_EVENT = b"\x00\x00\xff\xff"


@dataclass
class ConsoleTurn:
    """Figures of a turn, with or without consoles."""

    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    num_events: int = 0


@dataclass(frozen=True)
class ConsoleRound:
    """Two turns, one right after the other."""

    alone: ConsoleTurn
    watched: ConsoleTurn


class _Reader(asyncio.Protocol):
    """One open console: counts what comes, and looks at nothing."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.num_bytes = self.num_events = 0
        self._last = b""
        self.has_state = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self.num_events += (self._last + data).count(_END_OF_EVENT)
        self._last = data[1 - len(_END_OF_EVENT) :]
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
        rounds = asyncio.run(_measure_all(url, options))
    print_result(run, {"consoles": options.consoles, **_summarize(rounds)})
    return 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="bench_console", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--consoles", type=parse_whole_number, default=200, help="open consoles (default %(default)s)")
    parser.add_argument("--rounds", type=parse_whole_number, default=16, help="rounds (default %(default)s)")
    parser.add_argument(
        "--turn-s", type=make_positive(float), default=45.0, help="length of a turn (default %(default)s)"
    )
    parser.add_argument(
        "--warm-up-s",
        type=parse_not_negative,
        default=10.0,
        help="from the opening of consoles to the first request that counts, in both turns (default %(default)s)",
    )
    parser.add_argument("--steps", type=parse_whole_number, default=2, help="denoising steps (default %(default)s)")
    parser.add_argument("--side", type=parse_whole_number, default=64, help="of the images (default %(default)s)")
    parser.add_argument("--url", help="one of deployments/tiny.yaml that runs here already; without it one is started")
    parser.add_quick(consoles=20, rounds=2, turn_s=1.0, warm_up_s=0.1)
    return parser.parse_args(argv)


async def _measure_all(url: str, options: argparse.Namespace) -> list[ConsoleRound]:
    rounds = []
    # Not through a proxy of the environment: the service is on this machine.
    async with httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False) as client:
        await _ask(client, options, 0)
        for number in range(options.rounds):
            order = (False, True) if number % 2 == 0 else (True, False)
            turns = {watched: await _measure(client, url, options, watched) for watched in order}
            rounds.append(ConsoleRound(turns[False], turns[True]))
            alone_ms, watched_ms = (compute_median_ms(turns[watched].latencies_s) for watched in (False, True))
            print(f"round {number + 1}: {alone_ms} ms without consoles, {watched_ms} ms with", flush=True)
    return rounds


async def _measure(client: httpx.AsyncClient, url: str, options: argparse.Namespace, watched: bool) -> ConsoleTurn:
    turn = ConsoleTurn()
    async with _open_consoles(url, options.consoles if watched else 0) as readers:
        settled_s = time.perf_counter() + options.warm_up_s
        while time.perf_counter() < settled_s:
            await _ask(client, options, 0)
        bytes_before, events_before = _count(readers)
        cpu_before, began_s = read_cpu_seconds(), time.perf_counter()
        while turn.seconds < options.turn_s:
            turn.latencies_s.append(await _ask(client, options, len(turn.latencies_s)))
            turn.seconds = time.perf_counter() - began_s
        cpu_after = read_cpu_seconds()
        turn.cpu_s = {kind: cpu_after.get(kind, 0.0) - cpu_before.get(kind, 0.0) for kind in PROCESS_KINDS}
        num_bytes, num_events = _count(readers)
        turn.num_bytes, turn.num_events = num_bytes - bytes_before, num_events - events_before
    return turn


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
    head = f"GET {address.path.rstrip('/')}{_EVENTS} HTTP/1.1\r\nHost: {address.netloc}\r\n"
    head += "Accept-Encoding: gzip\r\n\r\n"
    loop, opened = asyncio.get_running_loop(), []
    try:
        for _ in range(count):
            opened.append(await loop.create_connection(lambda: _Reader(head.encode()), host, address.port or 80))
        async with asyncio.timeout(_OPEN_S):
            await asyncio.gather(*(reader.has_state for _, reader in opened))
        yield [reader for _, reader in opened]
    finally:
        for transport, _ in opened:
            transport.abort()


def _count(readers: Sequence[_Reader]) -> tuple[int, int]:
    return sum(reader.num_bytes for reader in readers), sum(reader.num_events for reader in readers)


def _summarize(rounds: Sequence[ConsoleRound]) -> dict[str, Any]:
    alone, watched = [each.alone for each in rounds], [each.watched for each in rounds]
    seconds = sum(turn.seconds for turn in watched)
    figures: dict[str, Any] = {
        "rounds": len(rounds),
        "requests": sum(len(turn.latencies_s) for turn in alone),
        **_compare("latency_ratio", rounds, statistics.median),
        **_compare("mean_latency_ratio", rounds, statistics.fmean),
        "events_per_s": round(sum(turn.num_events for turn in watched) / seconds, 2),
        "bytes_per_s": round(sum(turn.num_bytes for turn in watched) / seconds, 1),
    }
    for name, turns in (("alone", alone), ("watched", watched)):
        seconds = sum(turn.seconds for turn in turns)
        cpu = {kind: round(1000 * sum(turn.cpu_s[kind] for turn in turns) / seconds, 2) for kind in PROCESS_KINDS}
        all_s = [latency_s for turn in turns for latency_s in turn.latencies_s]
        figures[name] = {**summarize_ms(all_s), "cpu_ms_per_s": cpu}
    return figures


def _compare(
    name: str, rounds: Sequence[ConsoleRound], average: Callable[[Sequence[float]], float]
) -> dict[str, float | list[float]]:
    """The ratio of the average latencies, with consoles over without: the geometric mean of the rounds', and its
    interval."""
    ratios = [average(each.watched.latencies_s) / average(each.alone.latencies_s) for each in rounds]
    interval = compute_interval(ratios, statistics.geometric_mean)
    return {
        name: round(statistics.geometric_mean(ratios), 4),
        f"{name}_interval": [round(end, 4) for end in interval],
    }


if __name__ == "__main__":
    sys.exit(main())
