#!/usr/bin/env python3
"""Replays a trace against a running service, open loop, and reports what became of it.

Exit status: 0 when all requests completed, 1 when any failed, 2 for bad usage (unreadable trace, no service, ...), 130
after Ctrl-C: the report then has the requests that had ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from traces.formats import read_trace
from traces.replay import replay
from traces.report import summary_table, write_report
from traces.requests import TraceRequest, scale_pixels
from traces.results import ReplayResult
from tridentserve.errors import TridentServeError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the whole usage."""
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def _positive(number: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = number(text)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(text)
        return value

    parse.__name__ = f"positive {'whole number' if number is int else 'number'}"
    return parse


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="replay_trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real, whole = _positive(float), _positive(int)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="Request(...) lines or our CSV")
    parser.add_argument("--url", required=True, help="address of the service, such as http://127.0.0.1:8000")
    parser.add_argument("--speed", type=real, default=1.0, help="play the trace this many times as fast (default 1)")
    parser.add_argument("--limit", type=whole, help="only the first so many requests")
    parser.add_argument("--scale-pixels", type=real, default=1.0, metavar="F", help="multiply the pixels of each size")
    parser.add_argument("--steps", type=whole, help="denoising steps of every request, instead of the trace's")
    parser.add_argument("--model", help="model of every request, instead of the trace's (default: the only one served)")
    parser.add_argument("--timeout-s", type=real, default=600.0, metavar="S", help="give up a request after S seconds")
    parser.add_argument(
        "--out", type=Path, default=Path("out/replay"), metavar="DIR", help="folder of the report (default out/replay)"
    )
    return parser.parse_args(argv)


def _load(arguments: argparse.Namespace) -> list[TraceRequest]:
    requests = read_trace(arguments.trace, arguments.limit)
    if arguments.scale_pixels != 1.0:
        requests = [scale_pixels(request, arguments.scale_pixels) for request in requests]
    if arguments.steps is not None:
        requests = [replace(request, num_inference_steps=arguments.steps) for request in requests]
    return requests


class _Progress:
    """The bar on stderr. It appears with the first request sent: no bar stands above a message of bad usage."""

    def __init__(self, total: int) -> None:
        self.total, self.sent, self.failed = total, 0, 0
        self.ended: list[ReplayResult] = []
        self.bar: tqdm[NoReturn] | None = None

    def on_sent(self, request: TraceRequest) -> None:
        # miniters=0 lets update(0) redraw: how many were sent shows even while nothing has come back.
        if self.bar is None:
            self.bar = tqdm(total=self.total, unit="req", miniters=0, mininterval=0.2, file=sys.stderr)
        self.sent += 1
        self._show(0)

    def on_done(self, result: ReplayResult) -> None:
        self.ended.append(result)
        self.failed += result.error is not None
        self._show(1)

    def _show(self, done: int) -> None:
        if self.bar is not None:
            self.bar.set_postfix(sent=self.sent, failed=self.failed, refresh=False)
            self.bar.update(done)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _run(arguments: argparse.Namespace, requests: list[TraceRequest]) -> tuple[list[ReplayResult], bool]:
    """The results of the requests that ended, and whether it was interrupted before all of them had."""
    with closing(_Progress(len(requests))) as progress:
        replaying = replay(
            requests,
            arguments.url,
            speed=arguments.speed,
            model=arguments.model,
            timeout_s=arguments.timeout_s,
            on_sent=progress.on_sent,
            on_done=progress.on_done,
        )
        try:
            return asyncio.run(replaying), False
        except KeyboardInterrupt:
            return sorted(progress.ended, key=lambda result: result.sent_s), True


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    # Each request in flight is an open socket, and an open loop may have thousands of them.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    try:
        requests = _load(arguments)
        arguments.out.mkdir(parents=True, exist_ok=True)  # rather fail now than after half an hour of replay
        results, interrupted = _run(arguments, requests)
        if interrupted:
            ended = f"{len(results)} of {len(requests)} requests had ended"
            print(f"replay_trace: interrupted; {ended}{'' if results else '; no report written'}", file=sys.stderr)
            if not results:
                return 130
        figures = write_report(arguments.out, results, service=arguments.url)
    except (TridentServeError, OSError) as error:
        print(f"replay_trace: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("replay_trace: interrupted; no report written", file=sys.stderr)
        return 130
    print(summary_table(figures))
    print(f"{'report':22} {arguments.out}/summary.json, requests.csv, trace.json")
    print(json.dumps(figures, allow_nan=False))
    if interrupted:
        return 130
    return 1 if figures["failed_requests"] else 0


if __name__ == "__main__":
    sys.exit(main())
