"""Searches for the number of GPUs that a workload needs, by simulation, for `plan.py --attainment`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from tqdm import tqdm

from deployments.assembly.options import format_options
from deployments.assembly.simulation import SimulationSetup, make_cluster_options, set_deadlines, simulate
from placement.cluster_file import ClusterSpec
from profiler import CostModel
from traces.reports.report import compute_percentile
from traces.simulated import check_profiled, make_arrivals
from traces.workloads.arrivals import draw_arrival_times
from traces.workloads.mixes import Mix, draw, load_figure
from tridentserve.engine.simulated import TimedRequest
from tridentserve.errors import ConfigError, PlacementError


@dataclass(frozen=True, slots=True)
class Trial:
    """A cluster that was tried, and its results."""

    nodes: int
    """The number of nodes of the cluster."""
    attainment: float = 0.0
    mean_s: float | None = None
    """The mean latency of completed requests."""
    p95_s: float | None = None
    """The 95th percentile of the latencies of completed requests."""
    error: str = ""
    """The reason why the models do not fit there at all; else empty."""


def find_smallest(attainment: float, first: int, most: int, try_nodes: Callable[[int], Trial]) -> list[Trial]:
    """Trials in the order in which they were made: doubling from `first` nodes until one reaches the attainment, at
    most `most`, then halving the interval down to neighbours. The smallest one that reached it is the answer, none if
    `most` nodes do not. It takes for granted that more nodes do not do worse."""
    trials: list[Trial] = []
    below, above = 0, None
    nodes = min(max(first, 1), most)
    while above is None or above - below > 1:
        trials.append(try_nodes(nodes))
        if trials[-1].attainment >= attainment:
            above = nodes
        elif nodes == most:
            return trials
        else:
            below = nodes
        nodes = min(2 * nodes, most) if above is None else (below + above) // 2
    return trials


@dataclass(frozen=True, slots=True)
class Question:
    """The question of the smallest cluster on which a policy reaches an attainment."""

    mix: Mix
    """The requests, which come at the rate of the mix."""
    attainment: float
    """The share of the requests that must be on time."""
    duration_s: float
    """The seconds for which requests come."""
    policy: str
    seed: int
    max_gpus: int


def answer(question: Question, cluster: ClusterSpec, make_times: Callable[[], CostModel]) -> tuple[list[str], bool]:
    """The table of the clusters that were tried with the answer below it, and whether the attainment was reached.
    Clusters are of nodes like those of `cluster`. Raises `ConfigError` when those are of several kinds, and whatever
    the simulation raises."""
    if len({(group.gpus_per_node, group.memory_gb) for group in cluster.groups}) > 1:
        raise ConfigError("the cluster has several kinds of nodes: name one kind to ask how many of it are needed")
    node = cluster.groups[0]
    most = question.max_gpus // node.gpus_per_node
    if most < 1:
        raise ConfigError(f"--max-gpus is {question.max_gpus}, and one node has {node.gpus_per_node}")
    times = make_times()
    arrivals = _draw_arrivals(question, times)

    options = make_cluster_options(cluster, question.policy)

    def try_nodes(nodes: int) -> Trial:
        tried = cluster.model_copy(update={"groups": (node.model_copy(update={"nodes": nodes}),)})
        setup = SimulationSetup(tried.list_workers(), make_times, options)
        return _run_trial(nodes, nodes * node.gpus_per_node, arrivals, setup)

    # With fewer GPU-seconds than the requests on time need, there is no need to try.
    needed = question.attainment * load_figure(question.mix, times, node.gpus_per_node)
    trials = find_smallest(question.attainment, math.ceil(needed), most, try_nodes)
    lines, is_reached = _make_table(trials, question, cluster, times)
    return [format_options(options), *lines], is_reached


def _draw_arrivals(question: Question, times: CostModel) -> list[TimedRequest]:
    mix = question.mix
    times_s = draw_arrival_times(mix.arrivals, mix.rate_per_s, question.duration_s, question.seed)
    if not times_s:
        raise ConfigError(f"no request comes in {question.duration_s:g} s at {mix.rate_per_s:g}/s; try a longer time")
    arrivals = make_arrivals(draw(mix, times_s, question.seed), times.models)
    check_profiled(arrivals, times)
    return set_deadlines(arrivals, times, mix.slo_scale)


def _run_trial(nodes: int, gpus: int, arrivals: list[TimedRequest], setup: SimulationSetup) -> Trial:
    with tqdm(total=len(arrivals), desc=f"{gpus} GPUs", unit="req", leave=False, file=sys.stderr) as bar:

        def show(now_s: float, ended: int) -> None:
            bar.update(ended - bar.n)

        try:
            result = simulate(arrivals, replace(setup, engine=replace(setup.engine, on_progress=show)))
        except PlacementError as error:
            return Trial(nodes, error=str(error))
    latencies = [request.latency_s for request in result.requests if request.latency_s is not None]
    mean_s = sum(latencies) / len(latencies) if latencies else None
    return Trial(nodes, result.attainment, mean_s, compute_percentile(latencies, 95))


def _make_table(
    trials: list[Trial], question: Question, cluster: ClusterSpec, times: CostModel
) -> tuple[list[str], bool]:
    per_node = cluster.groups[0].gpus_per_node
    lines = [f"{'GPUs':>6} {'nodes':>6} {'load':>6} {'on time':>8} {'mean s':>9} {'P95 s':>9}"]
    for trial in sorted(trials, key=lambda trial: trial.nodes):
        gpus = trial.nodes * per_node
        start = f"{gpus:6} {trial.nodes:6} {load_figure(question.mix, times, gpus):6.0%}"
        if trial.error:
            lines.append(f"{start} does not fit: {trial.error}")
        else:
            lines.append(
                f"{start} {trial.attainment:8.1%} {_format_seconds(trial.mean_s)} {_format_seconds(trial.p95_s)}"
            )
    wanted = f"{question.attainment:.1%} on time at {question.mix.rate_per_s:g} requests/s"
    reached = min((t for t in trials if t.attainment >= question.attainment), key=lambda t: t.nodes, default=None)
    if reached is None:
        gpus = max(trial.nodes for trial in trials) * per_node
        lines += ["", f"Not reached: {wanted} needs more than {gpus} GPUs, the most that were tried (--max-gpus)."]
        return lines, False
    kind = f"{reached.nodes} nodes of {per_node}" if reached.nodes > 1 else f"1 node of {per_node}"
    lines += ["", f"{reached.nodes * per_node} GPUs ({kind} {cluster.gpu}) are enough for {wanted}."]
    return lines, True


def _format_seconds(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.3f}':>9}"
