#!/usr/bin/env python3
"""Writes a trace: a named workload, or the arrivals of a trace of others with sizes drawn from a mix.

OUT is CSV when it ends in .csv, else Request(...) lines; its first lines say where the requests come from. See
docs/traces.md for the workloads and mixes. Exit status: 0 when OUT was written, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from lib.command_line import Parser, parse_whole_number

from traces import WORKLOADS, DrawnTrace, load_mix, make_workload, mix_names, read_external, rescale, write_trace
from traces.workloads.arrivals import Process
from traces.workloads.named import DURATION_S
from tridentserve.errors import TridentServeError

_WITH_CV: tuple[Process, ...] = ("gamma", "weibull")
# Options that only one of the two sources has, with their defaults.
_OF_EXTERNAL = {"start_s": 0.0}
_OF_WORKLOAD = {"model": None, "rate_scale": 1.0, "arrivals": None, "cv": 1.0, "deadline_scale": 1.0, "steps": None}


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="make_trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workload", choices=WORKLOADS, help="a named workload")
    source.add_argument(
        "--from", dest="external", type=Path, metavar="FILE", help="Azure LLM 2023, Alibaba GenAI or ServeGen CSV(s)"
    )
    parser.add_argument("--model", help="model of a workload that several models have")
    parser.add_argument("--mix", help=f"sizes for --from: a .yaml file or one of {', '.join(mix_names())}")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT", help="file to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of all that is drawn (default %(default)s)")
    parser.add_argument(
        "--duration-s",
        type=float,
        metavar="S",
        help=f"length of the trace (default {DURATION_S:g}; with --from all of it)",
    )
    parser.add_argument(
        "--start-s",
        type=float,
        metavar="S",
        help="second of the --from file to begin at (default %(default)g)",
    )
    parser.add_argument(
        "--requests", type=parse_whole_number, metavar="N", help="scale to N requests, with the same pattern in time"
    )
    parser.add_argument("--rate-scale", type=float, metavar="X", help="multiply the rate of the workload")
    parser.add_argument("--arrivals", choices=get_args(Process), help="arrival process, instead of the workload's")
    parser.add_argument("--cv", type=float, help="coefficient of variation of gamma and weibull arrivals")
    parser.add_argument(
        "--deadline-scale", type=float, metavar="X", help="multiply the deadlines that the workload fixes"
    )
    parser.add_argument(
        "--steps", type=parse_whole_number, metavar="N", help="denoising steps, instead of the workload's"
    )
    parser.set_defaults(**_OF_EXTERNAL, **_OF_WORKLOAD)
    arguments = parser.parse_args(argv)
    if (arguments.external is None) != (arguments.mix is None):
        parser.error("--from and --mix go together: a trace of others holds no sizes")
    misplaced = _list_changed(arguments, _OF_EXTERNAL if arguments.external is None else _OF_WORKLOAD)
    if misplaced:
        parser.error(f"{', '.join(misplaced)} has no meaning with {'--from' if arguments.external else '--workload'}")
    if arguments.cv != _OF_WORKLOAD["cv"] and arguments.arrivals not in _WITH_CV:
        parser.error(f"--cv has no meaning without --arrivals {' or '.join(_WITH_CV)}")
    return arguments


def _list_changed(arguments: argparse.Namespace, options: Mapping[str, object]) -> list[str]:
    """The options that are not at their defaults, as they stand on a command line."""
    values = {
        name: getattr(arguments, name) for name, default in options.items() if getattr(arguments, name) != default
    }
    return [f"--{name.replace('_', '-')} {value}" for name, value in values.items()]


def _make(arguments: argparse.Namespace) -> DrawnTrace:
    if arguments.external is not None:
        mix = load_mix(arguments.mix)
        return read_external(
            arguments.external, mix, arguments.seed, start_s=arguments.start_s, duration_s=arguments.duration_s
        )
    requests = make_workload(
        arguments.workload,
        arguments.model,
        arguments.seed,
        DURATION_S if arguments.duration_s is None else arguments.duration_s,
        arguments.rate_scale,
        arrivals=arguments.arrivals,
        cv=arguments.cv,
        deadline_scale=arguments.deadline_scale,
        num_inference_steps=arguments.steps,
    )
    options = " ".join(
        [f"--workload {arguments.workload}", *_list_changed(arguments, {**_OF_WORKLOAD, "duration_s": None})]
    )
    return DrawnTrace(requests, f"make_trace {options} --seed {arguments.seed}")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    try:
        drawn = _make(arguments)
        requests, provenance = drawn.requests, drawn.provenance
        if arguments.requests is not None:
            requests = rescale(requests, arguments.requests, arguments.seed)
            provenance += f"; scaled from {len(drawn.requests)} to {len(requests)} requests"
        if not requests:
            print("make_trace: no request comes in so short a time; raise --duration-s or the rate", file=sys.stderr)
            return 2
        write_trace(requests, arguments.out, comment=provenance)
    except (TridentServeError, OSError) as error:
        print(f"make_trace: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: {len(requests)} requests in {requests[-1].timestamp_s:.0f} s ({provenance})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
