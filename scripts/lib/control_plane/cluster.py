"""The cluster, its stage times and its trace: the same for the processes of the benchmark and for the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deployments.assembly.options import ServiceOptions
from deployments.assembly.planning import Planners, assemble
from deployments.assembly.simulation import (
    SimulationSetup,
    list_first_mix,
    load_times,
    make_cluster_options,
    set_deadlines,
    simulate,
)
from dispatch.options import DEFAULT_POLICY
from placement.cluster_file import ClusterSpec, NodeGroup
from profiler import CostModel
from traces import make_workload
from traces.simulated import make_arrivals
from traces.workloads.mixes import load_mix
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated import SimulationOptions, SimulationResult, TimedRequest
from tridentserve.engine.simulated.workers.actual_times import ActualTimes

GPUS_PER_NODE = 8
_GPU, _PROFILE, _MEMORY_GB = "NVIDIA L20", "l20", 48.0
_MIX = "medium"
_OUT_OF_REACH = 1_000_000


@dataclass(frozen=True, slots=True)
class Truth:
    """A cluster of L20 GPUs that serves one model, whose placement does not change."""

    model: str
    num_workers: int
    num_steps: int | None = None
    """Denoising steps of every request; None: those of the mix."""

    def list_workers(self) -> list[WorkerSpec]:
        return self._make_cluster().list_workers()

    def make_times(self) -> CostModel:
        return load_times(self._make_cluster(), [_PROFILE])()

    def make_actual_times(self) -> ActualTimes:
        return ActualTimes(self.make_times(), jitter=0.0, seed=0)

    def make_options(self) -> ServiceOptions:
        """The shipped ones, but for the placement, which stays, and the bound on unfinished requests, which is out of
        reach: the simulator has none."""
        options = make_cluster_options(self._make_cluster(), DEFAULT_POLICY)
        return replace(options, replans=False, engine=replace(options.engine, max_requests=_OUT_OF_REACH))

    def make_planners(self, arrivals: Sequence[TimedRequest]) -> Planners:
        """The scheduler for a load like these arrivals."""
        return assemble(self.make_options(), self.make_times(), self.list_workers(), list_first_mix(arrivals))

    def draw_arrivals(self, rate_per_s: float, duration_s: float, seed: int) -> list[TimedRequest]:
        """Poisson arrivals of the model's medium mix, with deadlines."""
        scale = rate_per_s / load_mix(f"{self.model}-{_MIX}").rate_per_s
        requests = make_workload(_MIX, self.model, seed, duration_s, scale, arrivals="poisson")
        times = self.make_times()
        arrivals = make_arrivals(requests, times.models, self.model)
        if self.num_steps is not None:
            arrivals = [(at_s, replace(spec, num_inference_steps=self.num_steps)) for at_s, spec in arrivals]
        return set_deadlines(arrivals, times)

    def simulate(self, arrivals: Sequence[TimedRequest]) -> SimulationResult:
        setup = SimulationSetup(
            self.list_workers(), self.make_times, self.make_options(), engine=SimulationOptions(jitter=0.0)
        )
        return simulate(arrivals, setup)

    def _make_cluster(self) -> ClusterSpec:
        nodes = max(1, self.num_workers // GPUS_PER_NODE)
        per_node = min(self.num_workers, GPUS_PER_NODE)
        group = NodeGroup(nodes=nodes, gpus_per_node=per_node, gpu=_GPU, memory_gb=_MEMORY_GB)
        return ClusterSpec(groups=(group,))
