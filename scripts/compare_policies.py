#!/usr/bin/env python3
"""Compares dispatch policies live: each serves the same traces, on real workers of this machine, in turns.

A service of four tiny SD3 workers (or that of --config, without its placement) is started for each policy, and again
for each repetition, in an order that changes from repetition to repetition, so that a machine that drifts favours none.
One more service, before them, says what each size takes on one worker; where there is only one worker, the first
policy's service says so. From that come the rate of the traces (--load, as a share of what the workers can do) and the
deadlines (--slo-scale times the time alone), the same for all policies. One trace has Poisson arrivals, the other comes
in bursts.

Run it on an otherwise idle machine. The last line is one JSON object. Exit status: 0 when all requests were served, 1
when one failed, 2 for bad usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, make_positive, parse_policy_name, parse_sides, parse_whole_number
from lib.compare.contest import Contest, ContestLoad
from lib.compare.standings import format_standings, summarize
from lib.local_service import add_serve_url

from deployments.config.file import read_args
from tridentserve.errors import TridentServeError

_POLICIES = ("default", "b6", "b4")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse_arguments(argv)
    try:
        args = read_args(options.config)
        if options.workers is not None:
            cluster = args.cluster.model_copy(update={"workers_per_node": options.workers})
            args = args.model_copy(update={"cluster": cluster})
        run = describe_run(libraries=("ray", "torch"))
        contest = Contest(
            args,
            ContestLoad(
                options.sides, options.steps, options.requests, options.load, options.slo_scale, options.rounds
            ),
            options.seed,
            options.serve_url,
        )
        runs = contest.hold(options.policies, options.repetitions, report=lambda line: print(line, flush=True))
    except (TridentServeError, OSError) as error:
        print(f"compare_policies: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare_policies: interrupted; nothing was compared", file=sys.stderr)
        return 130
    rows = summarize(runs, options.policies)
    print(format_standings(rows))
    asked = {"config": str(options.config), "load": options.load, "slo_scale": options.slo_scale}
    print_result(run, {**asked, "requests": contest.count_requests(), "rows": rows})
    return 1 if any(each.failed for each in runs) else 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="compare_policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("deployments/tiny.yaml"),
        help="the Serve config file, whose first model is asked for (default %(default)s)",
    )
    parser.add_argument(
        "--policies",
        type=parse_policy_name,
        nargs="+",
        default=list(_POLICIES),
        metavar="P",
        help=f"policies; ratios are to the first (default {' '.join(_POLICIES)})",
    )
    parser.add_argument(
        "--repetitions", type=parse_whole_number, default=3, help="runs of each policy (default %(default)s)"
    )
    parser.add_argument(
        "--sides", type=parse_sides, default="256,384,512", help="three sides in pixels (default %(default)s)"
    )
    parser.add_argument("--steps", type=parse_whole_number, default=20, help="denoising steps (default %(default)s)")
    parser.add_argument(
        "--requests", type=parse_whole_number, default=80, help="requests of each trace (default %(default)s)"
    )
    parser.add_argument(
        "--load", type=make_positive(float), default=0.9, help="share of what the workers can do (default %(default)s)"
    )
    parser.add_argument(
        "--slo-scale",
        type=make_positive(float),
        default=3.0,
        help="deadline over the time that a request takes alone on one worker (default %(default)g)",
    )
    parser.add_argument(
        "--rounds", type=parse_whole_number, default=3, help="warm-up requests of each size (default %(default)s)"
    )
    parser.add_argument("--workers", type=parse_whole_number, help="workers of a node, instead of the configuration's")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traces (default %(default)s)")
    add_serve_url(parser)
    parser.add_quick(
        policies=["default"], repetitions=1, sides=[64, 128, 256], steps=2, requests=3, rounds=1, workers=1
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
