"""One cell of the grid: a workload, drawn with a seed, served by one policy on a simulated cluster."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from deployments.simulation import GIB, SimulationSetup, simulate, with_deadlines
from evaluation.rows import CellResult, details_of, row_of
from placement.cluster_file import ClusterSpec, NodeGroup, read_cluster
from profiler import CostModel, load_cost_model
from traces.bound import on_time_bound
from traces.requests import TraceRequest
from traces.workloads import WORKLOADS, make_workload
from tridentserve.engine.simulated import Arrival, SimulationOptions
from tridentserve.errors import ConfigError
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduler import DEFAULT_SLO_SCALE

# The nodes of the paper's cluster (TridentServe, arXiv 2510.02838, section 8.1).
_NODE = NodeGroup(nodes=1, gpus_per_node=8, gpu="NVIDIA L20", memory_gb=48)


@dataclass(frozen=True, slots=True)
class Settings:
    """What all cells of a grid share. `cluster` is a YAML file; None: nodes of 8 NVIDIA L20. `solve_time`: what a tick
    of the scheduler costs in the simulation, in seconds."""

    gpus: int
    duration_s: float
    profiles: str
    cluster: str | None = None
    solve_time_s: float = 0.0

    def cluster_spec(self) -> ClusterSpec:
        """Raises `ConfigError` for a file that is no cluster, or that has another number of GPUs."""
        if self.cluster is None:
            per_node = min(self.gpus, _NODE.gpus_per_node)
            if self.gpus % per_node:
                raise ConfigError(f"--gpus is {self.gpus}; it must be a multiple of {per_node}, or give --cluster")
            changed = {"nodes": self.gpus // per_node, "gpus_per_node": per_node}
            return ClusterSpec(groups=(_NODE.model_copy(update=changed),))
        spec = read_cluster(Path(self.cluster))
        if (found := sum(group.nodes * group.gpus_per_node for group in spec.groups)) != self.gpus:
            raise ConfigError(f"{self.cluster} has {found} GPUs, not {self.gpus}; set --gpus {found}")
        return spec


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """`slo_scale` multiplies the deadlines of the workload: 1 leaves them as they are (2.5 times the latency at the
    optimal degrees, where the workload says nothing else)."""

    model: str
    workload: str
    slo_scale: float
    seed: int
    policy: str

    @property
    def trace_seed(self) -> int:
        """The same for all policies and SLO scales; another for each model, workload and seed."""
        text = f"{self.model}/{self.workload}/{self.seed}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])

    @property
    def name(self) -> str:
        return "/".join(map(str, asdict(self).values()))


def grid(
    models: Sequence[str],
    workloads: Sequence[str],
    policies: Sequence[str],
    seeds: int,
    slo_scales: Sequence[float] = (1.0,),
) -> Iterator[Cell]:
    """All cells, those of one trace beside one another. A workload of one model of its own is taken once, whatever the
    models; its model is named `mixed` when it has several. Raises `ConfigError` for an unknown workload."""
    for workload in workloads:
        if workload not in WORKLOADS:
            raise ConfigError(f"no workload is named {workload!r}; there are: {', '.join(WORKLOADS)}")
    own = {name: sorted({m for mix in WORKLOADS[name].load_mixes() for m in mix.models})
           for name in workloads if not WORKLOADS[name].per_model}  # fmt: skip
    pairs = [(model, workload) for model in models for workload in workloads if workload not in own]
    pairs += [(own[name][0] if len(own[name]) == 1 else MIXED, name) for name in workloads if name in own]
    for model, workload in pairs:
        for seed in range(seeds):
            for slo_scale in slo_scales:
                for policy in policies:
                    yield Cell(model, workload, slo_scale, seed, policy)


MIXED = "mixed"


def run_cell(cell: Cell, settings: Settings) -> CellResult:
    """Simulates one cell. Raises what `simulate` raises."""
    arrivals, bound = _trace(cell.model, cell.workload, cell.slo_scale, cell.trace_seed, settings)
    setup = SimulationSetup(
        workers=settings.cluster_spec().workers(),
        make_times=partial(_times, settings),
        policy=cell.policy,
        engine=SimulationOptions(
            handoff_capacity_bytes=GIB, solve_time=settings.solve_time_s, seed=cell.trace_seed, keep_plans=False
        ),
    )
    start_s = time.perf_counter()
    result = simulate(arrivals, setup)
    wall_s = time.perf_counter() - start_s
    parameters: dict[str, Any] = {**asdict(cell), "gpus": settings.gpus, "duration_s": settings.duration_s}
    return CellResult(parameters | row_of(result, settings.duration_s, bound, wall_s), details_of(result))


def _times(settings: Settings) -> CostModel:
    return _cost_model(settings.profiles, settings.cluster_spec())


def _cost_model(profiles: str, cluster: ClusterSpec) -> CostModel:
    profiled = load_cost_model([profiles], cluster.gpu)
    return load_cost_model([profiles], cluster.gpu, cluster.links(profiled.links))


@lru_cache(maxsize=2)
def _trace(
    model: str, workload: str, slo_scale: float, seed: int, settings: Settings
) -> tuple[tuple[Arrival, ...], int]:
    """The trace with its deadlines, by the profile as it stands, and the bound: the same for all policies."""
    asked = None if model == MIXED else model
    requests = make_workload(workload, asked, seed, settings.duration_s, deadline_scale=slo_scale)
    times = _times(settings)
    scale = slo_scale * (WORKLOADS[workload].slo_scale(asked) or DEFAULT_SLO_SCALE)
    arrivals = with_deadlines([_arrival(request) for request in requests], times, scale)
    return tuple(arrivals), on_time_bound(arrivals, times, settings.gpus)


def _arrival(request: TraceRequest) -> Arrival:
    shape = Shape(request.height, request.width, request.num_frames)
    slo_s = None if request.slo_ms is None else request.slo_ms / 1000
    return request.timestamp_s, RequestSpec(
        request.request_id, str(request.model), shape, request.num_inference_steps, slo_s=slo_s
    )
