"""Measures one tick of the Dispatcher (build, solve, E and C), and how far its plan is from the proved bound.

One cluster of nodes of 8 serves the mixes of four models in equal parts: each policy places them by the same work for
each, and each has a quarter of the waiting requests. Every tick is a snapshot of its own, drawn from a seed: which
workers are idle, until when the others are busy, which requests wait and for how long. All worker views are new objects
in every tick, so that nothing the Dispatcher keeps from tick to tick saves time, unlike in a service. Everything is
measured twice: with requests that are all new, as in Table 4 of TridentServe (arXiv 2510.02838, section 8.5), and, for
policies that stop requests between two steps of D, with a share of them stopped, where the state of each is on some
worker. Ratios are to the policy's first cluster. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from lib.benchmark import describe_run, print_result
from lib.command_line import PROFILES, Parser, parse_not_negative, parse_policy_name, parse_whole_number
from lib.evaluate.cells import PAPER_NODE, make_paper_cluster

from deployments.assembly.planning import Planners, assemble, list_degrees_in_use
from deployments.assembly.simulation import make_cluster_options
from dispatch import DispatchOptions, IlpDispatcher
from dispatch.options import DEFAULT_POLICY, SolverName
from dispatch.policies import find_policy
from placement import LoadShare
from profiler import CostModel, read_shipped_table
from traces.workloads.mixes import Mix, load_mix
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import TridentServeError
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.process.long_lived import defer_collections, spare_long_lived
from tridentserve.protocols import ClusterView, PendingRequest, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.estimation.expected_times import DEFAULT_SLO_SCALE
from tridentserve.scheduling.estimation.request_work import estimate_work
from tridentserve.stages import Stage

_PENDING_PER_GPU = 10 / 32  # Table 4: pending requests grow with the cluster
_NOW_S = 10_000.0
_MODELS = ("cogvideox1.5-5b", "flux.1-dev", "hunyuanvideo", "sd3-medium")


@dataclass(frozen=True)
class Snapshots:
    """Draws the state of a cluster at one tick."""

    times: CostModel
    kinds: dict[str, list[LoadShare]]
    workers: Sequence[WorkerSpec]
    planners: Planners
    """The dispatcher and the placement of a policy."""
    num_pending: int
    primaries: Mapping[str, Sequence[WorkerId]]
    """The workers that hold D, by model."""

    def draw(self, rng: random.Random, stopped: float) -> ClusterView:
        """Draw a view: a tenth to half of the workers are idle, requests have waited up to 1.5 times their SLO, and the
        share `stopped` of them has begun."""
        pending = self._draw_pending(rng, stopped)
        return ClusterView(_NOW_S, pending, (), self._draw_views(rng, idle_share=rng.uniform(0.1, 0.5)))

    def _draw_views(self, rng: random.Random, idle_share: float) -> list[WorkerView]:
        """Workers become busy and idle in blocks of the degrees that plans use."""
        views: list[WorkerView] = []
        degrees = list_degrees_in_use(
            self.times, [kind for kinds in self.kinds.values() for kind in kinds], self.workers
        )
        while len(views) < len(self.workers):
            in_node = PAPER_NODE.gpus_per_node - len(views) % PAPER_NODE.gpus_per_node
            degree = rng.choice([k for k in degrees if in_node % k == 0])
            idle, free_at_s = rng.random() < idle_share, _NOW_S + rng.expovariate(1 / 20.0)
            for spec in self.workers[len(views) : len(views) + degree]:
                replicas = self.planners.placement.replicas[spec.worker_id]
                free_s = 0.0 if idle else free_at_s
                views.append(
                    WorkerView(spec.worker_id, spec.node_id, spec.memory_bytes, replicas, idle, free_s, replicas)
                )
        return views

    def _draw_pending(self, rng: random.Random, stopped: float) -> list[PendingRequest]:
        kinds = [self.kinds[model] for model in _MODELS]
        return [self._draw_request(i, kinds[i % len(kinds)], rng, stopped) for i in range(self.num_pending)]

    def _draw_request(
        self, number: int, kinds: Sequence[LoadShare], rng: random.Random, stopped: float
    ) -> PendingRequest:
        (kind,) = rng.choices(kinds, [each.weight for each in kinds])
        spec = RequestSpec(f"r{number}", kind.model, kind.shape, kind.num_inference_steps)
        slo_s = DEFAULT_SLO_SCALE * estimate_work(self.times, spec).seconds
        arrival_s = _NOW_S - 1.5 * slo_s * rng.random()
        request = PendingRequest(spec, arrival_s, arrival_s + slo_s)
        if not stopped or rng.random() >= stopped or kind.num_inference_steps < 2:
            return request
        steps_done = rng.randrange(1, kind.num_inference_steps)
        return replace(request, steps_done=steps_done, encoded=True, held_by=rng.choice(self.primaries[kind.model]))


def main() -> int:
    options = _parse_arguments()
    run = describe_run(platform.processor() or platform.machine(), libraries=("highspy", "pulp"))
    try:
        rows = _measure_rows(options.policies, 0.0, options)
        stopping = [policy for policy in options.policies if not find_policy(policy).runs_whole]
        stopped_rows = _measure_rows(stopping, options.stopped, options)
    except TridentServeError as error:
        print(f"bench_dispatch: {error}", file=sys.stderr)
        return 2
    print_result(run, {"rows": rows, "stopped_rows": stopped_rows})
    return 0


def _measure_rows(policies: Sequence[str], stopped: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all policies and clusters, which are printed as soon as they are there."""
    rows: list[dict[str, Any]] = []
    print(f"{stopped:.0%} of the requests stopped between segments")
    print(f"{'policy':<20} {'GPUs':>6} {'pending':>8} {'p50 ms':>8} {'p99 ms':>8} {'gap':>9} {'p50 ratio':>9}")
    for policy in policies:
        first_ms = None
        for gpus in options.gpus:
            row = _measure_row(policy, gpus, stopped, options)
            first_ms = first_ms or row["p50_ms"]
            row["p50_ratio"] = round(row["p50_ms"] / first_ms, 4)
            gap = "-" if row["gap"] is None else f"{row['gap']:.5f}"
            figures = f"{row['p50_ms']:8.1f} {row['p99_ms']:8.1f} {gap:>9} {row['p50_ratio']:9.2f}"
            print(f"{policy:<20} {gpus:6} {row['pending']:8} {figures}", flush=True)
            rows.append(row)
    return rows


def _measure_row(policy: str, gpus: int, stopped: float, options: argparse.Namespace) -> dict[str, Any]:
    """One warm-up tick, then `ticks` measured ones. The gap is the largest of them, None for a policy that is not the
    program of the default."""
    snapshots = _make_snapshots(policy, gpus, options)
    dispatcher = snapshots.planners.policy.dispatcher
    spare_long_lived()  # as the service does
    rng = random.Random(options.seed)
    took_s: list[float] = []
    gaps: list[float] = []
    for _ in range(options.ticks + 1):
        view = snapshots.draw(rng, stopped)
        with defer_collections():  # as every tick of the service
            start_s = time.perf_counter()
            dispatcher.decide(view)
            took_s.append(time.perf_counter() - start_s)
        if isinstance(dispatcher, IlpDispatcher):
            gaps.append(dispatcher.plan(view).gap)
    return {
        "policy": policy,
        "gpus": gpus,
        "pending": snapshots.num_pending,
        "p50_ms": round(1000 * statistics.median(took_s[1:]), 2),
        "p99_ms": round(1000 * _find_percentile(took_s[1:], 0.99), 2),
        "gap": max(gaps[1:], default=None),
    }


def _make_snapshots(policy: str, gpus: int, options: argparse.Namespace) -> Snapshots:
    table = read_shipped_table(options.profiles)
    cluster = make_paper_cluster(gpus, table.rows[0].gpu)
    times, workers = CostModel([table], device=cluster.gpu), cluster.list_workers()[:gpus]
    kinds = {model: _weigh_kinds(load_mix(f"{model}-{options.mix}"), model, times) for model in _MODELS}
    shipped = make_cluster_options(cluster, policy)
    service = replace(shipped, dispatch=replace(shipped.dispatch, solver=options.solver))
    planners = assemble(service, times, workers, [kind for model in _MODELS for kind in kinds[model]])
    primaries = {model: _list_primaries(planners.placement, model) for model in _MODELS}
    num_pending = round(gpus * _PENDING_PER_GPU)
    return Snapshots(times, kinds, workers, planners, num_pending, primaries)


def _list_primaries(placement: PlacementPlan, model: str) -> Sequence[WorkerId]:
    replica = Replica(model, Stage.DIFFUSE)
    return [worker_id for worker_id, held in placement.replicas.items() if replica in held]


def _weigh_kinds(mix: Mix, model: str, times: CostModel) -> list[LoadShare]:
    """The sizes of a mix, weighted so that all of them together bring one GPU-second at degree 1."""
    kinds = [(each.shape, each.num_inference_steps or mix.num_inference_steps, each.weight) for each in mix.shapes]
    kinds_of_steps = [(shape, steps if isinstance(steps, int) else max(steps or (1,)), w) for shape, steps, w in kinds]
    work_s = sum(w * n * times.seconds(model, Stage.DIFFUSE, shape) for shape, n, w in kinds_of_steps)
    return [LoadShare(model, shape, n, weight=w / work_s) for shape, n, w in kinds_of_steps]


def _find_percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that a share of all values does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def _parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpus", type=_parse_counts, default=[128, 256, 512, 1024, 4096], help="cluster sizes, comma-separated"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        type=parse_policy_name,
        default=[DEFAULT_POLICY],
        metavar="P",
        help=f"policies (default {DEFAULT_POLICY})",
    )
    parser.add_argument("--ticks", type=parse_whole_number, default=30, help="measured ticks per size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profiles", default=PROFILES, help="a profile table that comes with TridentServe")
    parser.add_argument("--mix", choices=("light", "medium", "heavy"), default="medium", help="mix of each model")
    parser.add_argument(
        "--stopped",
        type=parse_not_negative,
        default=0.25,
        help="share of the requests that were stopped between two segments, in the second table",
    )
    parser.add_argument("--solver", choices=get_args(SolverName), default=DispatchOptions().solver)
    parser.add_quick(gpus=[128, 256], ticks=2)
    return parser.parse_args()


def _parse_counts(text: str) -> list[int]:
    return [parse_whole_number(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
