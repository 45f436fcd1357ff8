#!/usr/bin/env python3
"""Print the placement that the Orchestrator makes for a cluster and a workload, and why.

Example: python scripts/plan.py --cluster deployments/clusters/l20-128.yaml --workload flux.1-dev-heavy
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from placement import LoadShare, Orchestrator
from placement.cluster_file import read_cluster
from placement.table import placement_lines
from profiler import load_cost_model
from traces.mixes import Mix, load_figure, load_mix
from tridentserve.errors import TridentServeError
from tridentserve.stages import Stage

_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    try:
        lines = _plan(arguments)
    except TridentServeError as error:
        print(f"plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _plan(arguments: argparse.Namespace) -> list[str]:
    cluster, mix = read_cluster(arguments.cluster), load_mix(arguments.workload)
    times = load_cost_model(arguments.profiles, cluster.gpu)
    workers = cluster.workers()
    largest_node = max(group.gpus_per_node for group in cluster.groups)
    degrees = {degree for model in mix.models for degree in times.degrees(model, Stage.DIFFUSE)}
    orchestrator = Orchestrator(
        times, arguments.handoff_mb * _MIB, sorted(degree for degree in degrees if degree <= largest_node)
    )
    plan = orchestrator.plan(_load(mix), workers)
    sizes = ", ".join(str(size) for size in sorted({group.gpus_per_node for group in cluster.groups}))
    load = load_figure(mix, times, len(workers))
    return [
        f"{mix.name}: {mix.rate_per_s:g} requests/s of {', '.join(mix.models)}",
        f"{len(workers)} {cluster.gpu} in nodes of {sizes}; the load needs "
        f"{load:.0%} of their GPU-seconds (every stage at the narrowest degree that was profiled)",
        "",
        "Type and GB free beside the weights, per GPU:",
        *placement_lines(plan, workers, times),
        "",
        *plan.reason.split("; "),
    ]


def _load(mix: Mix) -> list[LoadShare]:
    """The requests of a mix per second."""
    total = sum(shape.weight for shape in mix.shapes)
    return [
        LoadShare(
            mix.model_of(shape), shape.shape, steps, mix.rate_per_s * shape.weight / total / len(mix.steps_of(shape))
        )
        for shape in mix.shapes
        for steps in mix.steps_of(shape)
    ]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="plan", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cluster", type=Path, required=True, help="a YAML file, see deployments/clusters")
    parser.add_argument("--workload", required=True, help="a shipped mix by its name, or a YAML file (traces/mixes)")
    parser.add_argument(
        "--profiles", nargs="+", default=["l20"], help="shipped tables by name, CSV files or folders (default: l20)"
    )
    parser.add_argument(
        "--handoff-mb", type=int, default=2048, help="MiB kept free on each GPU for handoff buffers (default: 2048)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
