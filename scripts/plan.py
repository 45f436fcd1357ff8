#!/usr/bin/env python3
"""Print the placement with which a policy starts on a cluster, for a workload, and why. With --attainment: how many
such GPUs the workload needs, by simulation.

Example: python scripts/plan.py --cluster deployments/clusters/l20-128.yaml --workload flux.1-dev-heavy
         python scripts/plan.py --cluster deployments/clusters/l20-8.yaml --workload flux.1-dev-medium \\
                                --attainment 0.95 --rate 2
Exit status: 0; 1 when no cluster that was tried reaches the attainment; 2 for what cannot be planned.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lib.command_line import PROFILES, Parser, make_positive, parse_policy_name, parse_whole_number
from lib.sizing import Question, answer

from deployments.assembly.options import ServiceOptions
from deployments.assembly.planning import plan_placement, share_stages
from deployments.assembly.simulation import load_times, make_cluster_options
from dispatch.options import DEFAULT_POLICY
from placement import LoadShare
from placement.cluster_file import ClusterSpec, read_cluster
from placement.describe import describe_placement
from placement.shares import describe_shares
from traces.workloads.mixes import Mix, load_figure, load_mix
from tridentserve.byte_sizes import MIB
from tridentserve.errors import ConfigError, TridentServeError

# Options of --attainment, with their defaults.
_OF_WHAT_IF = {"duration_s": 600.0, "max_gpus": 1024, "seed": 0}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    reached = True
    try:
        mix = load_mix(arguments.workload)
        if arguments.rate is not None:
            mix = mix.model_copy(update={"rate_per_s": arguments.rate})
        cluster = read_cluster(arguments.cluster)
        if arguments.attainment is None:
            lines = _plan(arguments, cluster, mix)
        else:
            lines, reached = _answer_what_if(arguments, cluster, mix)
    except TridentServeError as error:
        print(f"plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0 if reached else 1


def _answer_what_if(arguments: argparse.Namespace, cluster: ClusterSpec, mix: Mix) -> tuple[list[str], bool]:
    question = Question(
        mix, arguments.attainment, arguments.duration_s, arguments.policy, arguments.seed, arguments.max_gpus
    )
    lines, reached = answer(question, cluster, load_times(cluster, arguments.profiles))
    about = f"{mix.name}: {mix.rate_per_s:g} requests/s of {', '.join(mix.models)} for {arguments.duration_s:g} s"
    return [f"{about}, policy {arguments.policy}", "", *lines], reached


def _plan(arguments: argparse.Namespace, cluster: ClusterSpec, mix: Mix) -> list[str]:
    times = load_times(cluster, arguments.profiles)()
    workers, load, options = cluster.list_workers(), _list_load(mix), _make_options(arguments, cluster)
    shares = share_stages(options, times, workers, load)
    times = times.share(shares, {}) if shares else times
    plan = plan_placement(options, times, workers, load)
    sizes = ", ".join(str(size) for size in sorted({group.gpus_per_node for group in cluster.groups}))
    needed = load_figure(mix, times, len(workers))
    return [
        f"{mix.name}: {mix.rate_per_s:g} requests/s of {', '.join(mix.models)}",
        f"{len(workers)} {cluster.gpu} in nodes of {sizes}; the load needs "
        f"{needed:.0%} of their GPU-seconds (every stage at the narrowest degree that was profiled)",
        "",
        "Type and GB free in addition to the weights, per GPU:",
        *describe_placement(plan, workers, times),
        "",
        *plan.reason.split("; "),
        *describe_shares(times),
    ]


def _make_options(arguments: argparse.Namespace, cluster: ClusterSpec) -> ServiceOptions:
    """The options that ship, with the policy and the handoff buffer that are asked for."""
    shipped = make_cluster_options(cluster, arguments.policy)
    if arguments.handoff_mb is None:
        return shipped
    handoff_mb: float = arguments.handoff_mb
    if not 0 <= handoff_mb < math.inf:
        raise ConfigError(f"--handoff-mb is {handoff_mb:g}; it must be a number from 0 up")
    # Workers have a buffer of one byte at least.
    return replace(shipped, worker=replace(shipped.worker, handoff_bytes=max(1, round(handoff_mb * MIB))))


def _list_load(mix: Mix) -> list[LoadShare]:
    """The requests of a mix per second."""
    total = sum(shape.weight for shape in mix.shapes)
    return [
        LoadShare(
            mix.model_of(shape), shape.shape, steps, mix.rate_per_s * shape.weight / total / len(mix.steps_of(shape))
        )
        for shape in mix.shapes
        for steps in mix.steps_of(shape)
    ]


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="plan", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cluster", type=Path, required=True, help="a YAML file, see deployments/clusters")
    parser.add_argument("--workload", required=True, help="a shipped mix by its name, or a YAML file (see traces/data)")
    parser.add_argument(
        "--profiles",
        nargs="+",
        default=[PROFILES],
        help=f"shipped tables by name, CSV files or directories (default: {PROFILES})",
    )
    parser.add_argument(
        "--handoff-mb",
        type=float,
        metavar="MIB",
        help="size of the handoff buffer of each GPU (default: that of a service)",
    )
    parser.add_argument(
        "--rate", type=make_positive(float), metavar="R", help="requests per second, instead of the workload's"
    )
    parser.add_argument(
        "--policy",
        type=parse_policy_name,
        default=DEFAULT_POLICY,
        metavar="P",
        help="dispatch policy, by name or dotted path (default: %(default)s)",
    )
    what_if = parser.add_argument_group("number of GPUs for an attainment")
    what_if.add_argument(
        "--attainment",
        type=_parse_share,
        metavar="A",
        help="the share of requests that should be on time, such as 0.95",
    )
    what_if.add_argument(
        "--duration-s",
        type=make_positive(float),
        metavar="S",
        help=f"seconds of arrivals (default: {_OF_WHAT_IF['duration_s']:g})",
    )
    what_if.add_argument(
        "--max-gpus",
        type=parse_whole_number,
        metavar="N",
        help=f"the most GPUs to try (default: {_OF_WHAT_IF['max_gpus']})",
    )
    what_if.add_argument("--seed", type=int, help=f"seed of the requests (default: {_OF_WHAT_IF['seed']})")
    arguments = parser.parse_args(argv)
    for name, default in _OF_WHAT_IF.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        elif arguments.attainment is None:
            parser.error(f"--{name.replace('_', '-')} has no meaning without --attainment")
    return arguments


def _parse_share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share; it must be above 0 and at most 1, like 0.95")
    return value


_parse_share.__name__ = "share"  # as argparse names it in errors


if __name__ == "__main__":
    sys.exit(main())
