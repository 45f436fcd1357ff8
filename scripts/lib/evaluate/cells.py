"""One cell of the grid: a workload, drawn with a seed, served by one policy on a simulated cluster."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from deployments.assembly.options import ServiceOptions
from deployments.assembly.simulation import make_cluster_options
from dispatch.options import DEFAULT_POLICY
from placement.cluster_file import ClusterSpec, NodeGroup, read_cluster
from traces.workloads.arrivals import Process
from traces.workloads.named import WORKLOADS
from traces.workloads.unseen import UnseenCell, draw_cell
from tridentserve.engine.simulated import SimulationOptions
from tridentserve.errors import ConfigError

PAPER_WORKLOADS = ("light", "medium", "heavy", "dynamic", "proprietary")
BASELINES = ("b1", "b2", "b3", "b4", "b5", "b6")
# In place of a model's name, for a workload of several.
MIXED = "mixed"
# In place of a workload's name, for one whose parameters are drawn.
UNSEEN = "unseen"
# The nodes of the paper's cluster (TridentServe, arXiv 2510.02838, section 8.1).
PAPER_NODE = NodeGroup(nodes=1, gpus_per_node=8, gpu="NVIDIA L20", memory_gb=48)


def make_paper_cluster(gpus: int, gpu: str) -> ClusterSpec:
    """Nodes of the paper's size, at least `gpus` of this kind together."""
    nodes = math.ceil(gpus / PAPER_NODE.gpus_per_node)
    return ClusterSpec(groups=(PAPER_NODE.model_copy(update={"nodes": nodes, "gpu": gpu}),))


@dataclass(frozen=True, slots=True)
class NamedLoad:
    """Changes of the arrivals of workloads by name."""

    arrivals: Process | None = None
    """The process of arrivals; None: that of the workload, as in a diurnal workload always."""
    rate_scale: float = 1.0
    """A factor of the rate."""

    @property
    def process(self) -> str:
        """The name of the process, `own` for that of the workload."""
        return self.arrivals or "own"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that all cells of a grid share; all other options have their defaults."""

    gpus: int
    duration_s: float
    profiles: str
    cluster: str | None = None
    """A YAML file; None: nodes of 8 NVIDIA L20."""
    solve_time_s: Literal["measured"] | float = SimulationOptions().solve_time
    """The time that a tick of the scheduler takes in the simulation."""
    solve_limit_s: float | None = None
    """The time limit of a solve, in seconds of the wall clock; None: the default."""
    recorded: tuple[str, ...] | None = None
    """Files of published traces (or directories of ServeGen chunks) whose arrivals unseen cells may have."""
    named_load: NamedLoad = field(default_factory=NamedLoad)
    """The load of workloads by name."""

    def make_options(self, policy: str = DEFAULT_POLICY) -> ServiceOptions:
        """The options of a simulated service with this policy."""
        options = make_cluster_options(self.read_cluster_spec(), policy)
        if self.solve_limit_s is None:
            return options
        return replace(options, dispatch=replace(options.dispatch, time_limit_s=self.solve_limit_s))

    def read_cluster_spec(self) -> ClusterSpec:
        """Raises `ConfigError` for a file that is no cluster, or that has another number of GPUs."""
        if self.cluster is None:
            per_node = min(self.gpus, PAPER_NODE.gpus_per_node)
            if self.gpus % per_node:
                raise ConfigError(f"--gpus is {self.gpus}; it must be a multiple of {per_node}, or give --cluster")
            changed = {"nodes": self.gpus // per_node, "gpus_per_node": per_node}
            return ClusterSpec(groups=(PAPER_NODE.model_copy(update=changed),))
        spec = read_cluster(Path(self.cluster))
        if (found := sum(group.nodes * group.gpus_per_node for group in spec.groups)) != self.gpus:
            raise ConfigError(f"{self.cluster} has {found} GPUs, not {self.gpus}; set --gpus {found}")
        return spec


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One simulation of a grid: a policy, and the trace that it serves."""

    model: str
    workload: str
    slo_scale: float
    """A factor of the deadlines of the workload: 1 leaves them as they are (`DEFAULT_SLO_SCALE` times the latency at
    the optimal degrees, where the workload says nothing else)."""
    seed: int
    policy: str
    index: int = 0
    """The number of an unseen cell among those of its seed; of a paper's setting, the number of its rate."""

    @property
    def trace_seed(self) -> int:
        """The same for all policies and SLO scales; another for each model, workload, seed and index."""
        text = f"{self.model}/{self.workload}/{self.seed}" + (f"/{self.index}" if self.is_unseen else "")
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])

    @property
    def name(self) -> str:
        return "/".join(map(str, asdict(self).values()))

    @property
    def is_unseen(self) -> bool:
        """True for a cell of `traces.workloads.unseen`."""
        return self.workload == UNSEEN

    def draw_unseen(self, settings: Settings) -> UnseenCell:
        """The parameters of an unseen cell."""
        return draw_cell(self.seed, self.index, has_recorded=bool(settings.recorded))


def list_cells(
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
    pairs = [(model, name) for model in models for name in workloads if WORKLOADS[name].per_model]
    pairs += [(find_own_model(name), name) for name in workloads if not WORKLOADS[name].per_model]
    for model, workload in pairs:
        for seed in range(seeds):
            for slo_scale in slo_scales:
                for policy in policies:
                    yield Cell(model, workload, slo_scale, seed, policy)


def list_unseen_cells(seed: int, indices: Iterable[int], policies: Sequence[str], settings: Settings) -> Iterator[Cell]:
    """The cells of a seed with these numbers, those of one trace beside one another."""
    for index in indices:
        drawn = draw_cell(seed, index, has_recorded=bool(settings.recorded))
        for policy in policies:
            yield Cell("+".join(part.model for part in drawn.models), UNSEEN, 1.0, seed, policy, index)


def find_own_model(workload: str) -> str:
    """The model of a workload of its own model; `mixed` where it has several."""
    models = {model for mix in WORKLOADS[workload].load_mixes() for model in mix.models}
    return models.pop() if len(models) == 1 else MIXED
