"""The offline scenario of DiT-Serve's paper (appendix A.5): sets of requests that are all there at time zero."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from types import MappingProxyType
from typing import Literal, get_args

from deployments.assembly.simulation import SimulationSetup, load_times, set_deadlines, simulate
from lib.command_line import Parser, make_positive
from lib.evaluate.cells import MIXED, Cell, Settings
from lib.evaluate.related_systems.fixed_degrees import FIXED_DEGREES
from lib.evaluate.related_systems.settings import RELATED
from lib.evaluate.rows import CellResult, TraceRun, make_row
from placement.cluster_file import ClusterSpec
from profiler import load_tables
from profiler.loading import TableSource
from traces.reports.bound import bound_makespan
from traces.simulated import check_profiled, make_arrivals
from traces.workloads.mixes import draw, load_mix
from tridentserve.engine.simulated import SimulationOptions, TimedRequest
from tridentserve.protocols import StageTimes

Deadlines = Literal["far", "rule"]
# The setting whose mix and modelled GPUs are those of the paper's testbed.
_SETTING = RELATED["dit-serve on A100"]
# Options of `evaluate.py --offline`. The paper prints no number of requests: here are ten for each of the sixteen pairs
# of a size and a number of steps, on average.
OFFLINE: Mapping[str, object] = MappingProxyType(
    {
        "mix": _SETTING.workload,
        "requests": 160,
        "deadlines": "far",
        "gpus": 8,
        "seeds": 3,
        "seed": 0,
        "policies": [
            *("default", "dit-serve", "dit-serve-srtf", "dit-serve-sjf", "dit-serve-fcfs"),
            *(*_SETTING.baselines, FIXED_DEGREES[0], FIXED_DEGREES[-1]),
        ],
    }
)
# A deadline that no schedule comes near.
_FAR_S = 1e6
# A set is a part of so many times as many requests in the exact proportions of the mix, so that sets differ in what
# they ask for, as those of a mix that is drawn at random do.
_DECK = 16


def add_offline_options(parser: Parser) -> None:
    """The options of sets of requests that are all there at time zero."""
    add = parser.add_argument
    add("--mix", metavar="NAME", help="with --offline: a shipped mix by its name, or a YAML file (see traces/data)")
    add("--requests", type=make_positive(int), metavar="N", help="with --offline: the requests of each set")
    add(
        "--deadlines",
        choices=get_args(Deadlines),
        help="with --offline: deadlines that no schedule comes near, or those of the service's rule",
    )
    about = (
        "sets of requests that are all there at time zero, on modelled A100 or on --cluster, by the time until all are "
        "done; --seeds sets are drawn from --seed. Options that are not given have the values of this setting"
    )
    parser.add_mode("offline", about, OFFLINE)


@dataclass(frozen=True, slots=True)
class OfflineQuestion:
    """The sets that are drawn, apart from their seeds."""

    mix: str
    """The name of a mix, or the path of a file with one."""
    num_requests: int
    """The number of requests of each set."""
    deadlines: Deadlines
    """`far`: a deadline for all that no schedule comes near. `rule`: those of the mix, else those of the service's
    rule, which fall due while most requests still wait."""

    def list_cells(self, seed: int, sets: int, policies: Sequence[str]) -> Iterator[Cell]:
        """All cells, those of one set beside one another; `Cell.index` counts the sets."""
        mix = load_mix(self.mix)
        model = mix.models[0] if len(mix.models) == 1 else MIXED
        for index in range(sets):
            for policy in policies:
                yield Cell(model, mix.name, 1.0, seed, policy, index)

    def draw(self, cell: Cell, times: StageTimes, models: Sequence[str]) -> list[TimedRequest]:
        """The requests of a cell's set, the same for all policies. Raises `ProfileError` for a size that was not
        profiled."""
        mix = load_mix(self.mix)
        seed = Random(f"{mix.name}/{cell.seed}/{cell.index}").getrandbits(48)
        requests = draw(mix, [0.0] * (_DECK * self.num_requests), seed)[: self.num_requests]
        arrivals = make_arrivals(requests, models)
        check_profiled(arrivals, times)
        if self.deadlines == "far":
            return [(arrival_s, replace(spec, slo_s=_FAR_S)) for arrival_s, spec in arrivals]
        return set_deadlines(arrivals, times, mix.slo_scale)


def run_offline(question: OfflineQuestion, cell: Cell, settings: Settings) -> CellResult:
    """Serves one set with one policy. Of the details, `bound_s` is a makespan below which no schedule comes, and
    `makespan_s` that of the policy, from time zero to the end of the last request; None where a request has no
    result."""
    cluster, profiles = _choose_cluster(settings)
    make_times = load_times(cluster, profiles)
    times, workers = make_times(), cluster.list_workers()
    arrivals = question.draw(cell, times, times.models)
    engine = SimulationOptions(solve_time=settings.solve_time_s, seed=cell.seed)
    start_s = time.perf_counter()
    result = simulate(arrivals, SimulationSetup(workers, make_times, settings.make_options(cell.policy), engine=engine))
    row = make_row([TraceRun(result, 0.0)], len(arrivals), time.perf_counter() - start_s)
    ends_s = [request.latency_s for request in result.requests if request.latency_s is not None]
    details = {
        "bound_s": bound_makespan((spec for _, spec in arrivals), times, len(workers)),
        "makespan_s": max(ends_s) if len(ends_s) == len(arrivals) else None,
    }
    return CellResult({**asdict(cell), **row}, details)


def _choose_cluster(settings: Settings) -> tuple[ClusterSpec, Sequence[TableSource]]:
    """The cluster that was asked for with its profile, else nodes of up to eight of the paper's GPUs, as modelled."""
    cluster = settings.read_cluster_spec()
    if settings.cluster is not None:
        return cluster, [settings.profiles]
    gpu = _SETTING.gpu
    groups = [group.model_copy(update={"memory_gb": gpu.memory_gb}) for group in cluster.groups]
    tables = [gpu.model_table(table) for table in load_tables([settings.profiles])]
    return cluster.model_copy(update={"groups": tuple(groups)}), tables
