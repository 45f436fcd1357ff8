#!/usr/bin/env python3
"""Replays a trace against a running service, open loop, or in the simulator, and reports what became of it.

A trace holds no images: a model that starts from one (edits, videos from an image) is sent one for each request,
soft spots of colour made from the request's seed and size.

Exit status: 0 when all requests completed, 1 when any failed, 2 for bad usage (unreadable trace, no service, a size
that was not profiled, ...), 130 after Ctrl-C: the report of a service then has the requests that had ended.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from lib.command_line import PROFILES, Parser, make_positive, parse_not_negative

from traces.formats.ours import read_trace
from traces.reports.report import format_summary, write_report
from traces.requests import TraceRequest, scale_pixels
from traces.results import ReplayResult
from tridentserve.errors import TridentServeError
from tridentserve.requests import Quality

# Options that only one of the two ways has, with their defaults.
_OF_LIVE: dict[str, float | None] = {"timeout_s": 600.0, "save_images": None}
_OF_SIMULATED = {
    "policy": None,  # the default policy; its name is in `dispatch`, which the live way does not import
    "profiles": [PROFILES],
    "decision_log": None,
    "jitter": 0.0,
    "seed": 0,
    "solve_limit_s": None,
}


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="replay_trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real, whole = make_positive(float), make_positive(int)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="Request(...) lines or our CSV")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--url", help="address of the service, such as http://127.0.0.1:8000")
    way.add_argument("--simulate", type=Path, metavar="CLUSTER", help="simulate this cluster (deployments/clusters)")
    parser.add_argument(
        "--speed", type=real, default=1.0, help="play the trace this many times as fast (default %(default)g)"
    )
    parser.add_argument("--limit", type=whole, help="replay only the first N requests")
    parser.add_argument("--scale-pixels", type=real, default=1.0, metavar="F", help="multiply the pixels of each size")
    parser.add_argument("--steps", type=whole, help="denoising steps of every request, instead of the trace's")
    parser.add_argument(
        "--quality", choices=get_args(Quality), help="quality of every request, instead of the trace's (docs/api.md)"
    )
    parser.add_argument("--model", help="model of every request, instead of the trace's (default: the only one there)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/replay"),
        metavar="DIR",
        help="directory for the report (default %(default)s)",
    )
    live = parser.add_argument_group("with --url")
    live.add_argument(
        "--timeout-s",
        type=real,
        metavar="S",
        help=f"give up a request after S seconds (default {_OF_LIVE['timeout_s']:g})",
    )
    live.add_argument(
        "--save-images",
        type=Path,
        metavar="DIR",
        help="write each image and video into this directory, under its number in the trace and its request id",
    )
    simulated = parser.add_argument_group("with --simulate")
    simulated.add_argument(
        "--policy", metavar="P", help="dispatch policy, by name or dotted path (default: default; docs/planning.md)"
    )
    simulated.add_argument(
        "--profiles",
        nargs="+",
        metavar="P",
        help=f"shipped tables by name, CSV files or directories (default: {PROFILES})",
    )
    simulated.add_argument(
        "--decision-log", type=Path, metavar="FILE", help="file to which all events and effects are written"
    )
    simulated.add_argument(
        "--jitter",
        type=parse_not_negative,
        metavar="F",
        help=f"relative standard deviation of stage times (default {_OF_SIMULATED['jitter']:g})",
    )
    simulated.add_argument("--seed", type=int, help=f"seed of the jitter (default {_OF_SIMULATED['seed']})")
    simulated.add_argument(
        "--solve-limit-s", type=real, metavar="S", help="time limit of a solve, in real seconds, not simulated ones"
    )
    arguments = parser.parse_args(argv)
    _check_way(parser, arguments)
    return arguments


def _check_way(parser: Parser, arguments: argparse.Namespace) -> None:
    """Options of the other way are a mistake; those of this one get their defaults."""
    wanted, other = (_OF_LIVE, _OF_SIMULATED) if arguments.simulate is None else (_OF_SIMULATED, _OF_LIVE)
    for name in other:
        if getattr(arguments, name) is not None:
            way = "--url" if other is _OF_LIVE else "--simulate"
            parser.error(f"argument --{name.replace('_', '-')}: needs {way}")
    for name, default in wanted.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)


def _load(arguments: argparse.Namespace) -> list[TraceRequest]:
    requests = read_trace(arguments.trace, arguments.limit)
    if arguments.scale_pixels != 1.0:
        requests = [scale_pixels(request, arguments.scale_pixels) for request in requests]
    if arguments.steps is not None:
        requests = [replace(request, num_inference_steps=arguments.steps) for request in requests]
    if arguments.quality is not None:
        requests = [replace(request, quality=arguments.quality) for request in requests]
    return requests


def _run(arguments: argparse.Namespace, requests: list[TraceRequest]) -> tuple[list[ReplayResult], bool]:
    """The results of the requests that ended, and whether it was interrupted before all of them had."""
    # Imported here: neither way waits for the libraries of the other one.
    if arguments.simulate is not None:
        from lib.replay import simulated

        return simulated.run(arguments, requests), False
    from lib.replay import live

    return live.run(arguments, requests)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    try:
        requests = _load(arguments)
        arguments.out.mkdir(parents=True, exist_ok=True)  # rather fail now than after half an hour of replay
        results, interrupted = _run(arguments, requests)
        if interrupted:
            ended = f"{len(results)} of {len(requests)} requests had ended"
            print(f"replay_trace: interrupted; {ended}{'' if results else '; no report written'}", file=sys.stderr)
            if not results:
                return 130
        figures = write_report(arguments.out, results, service=arguments.url or f"simulated {arguments.simulate}")
    except (TridentServeError, OSError) as error:
        print(f"replay_trace: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("replay_trace: interrupted; no report written", file=sys.stderr)
        return 130
    print(format_summary(figures))
    print(f"{'report':22} {arguments.out}/summary.json, requests.csv, trace.json")
    print(json.dumps(figures, allow_nan=False))
    if interrupted:
        return 130
    return 1 if figures["failed_requests"] else 0


if __name__ == "__main__":
    sys.exit(main())
