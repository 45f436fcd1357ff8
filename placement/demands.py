"""The demand of a load on a cluster: the virtual replicas that it needs, the GPU-seconds of work for each, and how well
the workers of a placement keep up with it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from placement.units import count_smallest_workable
from placement.virtual_replicas import Fit, MemoryModel
from profiler.memory import compute_stages_peak_bytes, sum_weights_bytes
from profiler.monitor import StageSpeed
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import PlacementError
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.stages import PlacementType, Stage, VirtualReplica

# The weight of a kept size, relative to all of the load: enough for a smallest workable set and no more.
_KEPT_WEIGHT = 1e-9
# Requests per second and worker of stages that take no time by the profile.
_INSTANT_PER_S = 1e9

# Requests per second of work and worker, per model and placement type, as measured.
MeasuredRates = Mapping[tuple[str, PlacementType], float]


@dataclass(frozen=True, slots=True)
class ReplicaDemand:
    """The requests that need one virtual replica of one model, and the GPU-seconds per second they bring."""

    model: str
    fit: Fit
    load: tuple[LoadShare, ...]
    gpu_seconds: float

    @property
    def kinds(self) -> tuple[PlacementType, ...]:
        """The primary and its auxiliaries."""
        return (self.fit.replica.primary, *self.fit.replica.auxiliaries)

    @property
    def minimum(self) -> int:
        """Workers of the smallest workable set."""
        return count_smallest_workable(self.fit.replica, self.fit.min_degree, self.fit.units)


class ClusterCosts:
    """The costs of requests on one cluster. The worker with the least memory and the largest node decide."""

    def __init__(
        self, times: StageTimes, workers: Sequence[WorkerSpec], handoff_reserve_bytes: int, degrees: Sequence[int]
    ) -> None:
        self._times = times
        self._handoff_reserve_bytes = handoff_reserve_bytes
        self._degrees = degrees
        self._memory_bytes = min(worker.memory_bytes for worker in workers)
        self._largest_node = max(Counter(worker.node_id for worker in workers).values())
        self._memory: dict[str, MemoryModel] = {}
        self._fits: dict[tuple[str, VirtualReplica, Shape], Fit | None] = {}

    def find_memory_model(self, model: str) -> MemoryModel:
        """The memory model of one model on these workers. `PlacementError` when no profiled degree can be formed."""
        if model not in self._memory:
            profiled = self._times.degrees(model, Stage.DIFFUSE)
            degrees = tuple(degree for degree in self._degrees if degree in profiled and degree <= self._largest_node)
            if not degrees:
                raise PlacementError(
                    f"{model} was profiled at degrees {profiled}, in use are {tuple(self._degrees)}; profile one"
                )
            reserve_bytes = self._handoff_reserve_bytes
            self._memory[model] = MemoryModel(
                self._times, self._memory_bytes, reserve_bytes, degrees, self._largest_node
            )
        return self._memory[model]

    def compute_room_bytes(self, roles: Iterable[tuple[ReplicaDemand, PlacementType]]) -> int:
        """Bytes that one worker has left when it holds all of these types and runs one of them at a time, each at the
        degrees of its demand; negative when that does not fit."""
        weights: dict[Replica, int] = {}
        peak_bytes = 0
        for demand, kind in roles:
            for stage in kind.stages:
                weights[Replica(demand.model, stage)] = self._times.weights_bytes(demand.model, stage)
            for shape, degree in demand.fit.min_degrees.items():
                peak = compute_stages_peak_bytes(self._times, demand.model, kind.stages, shape, degree)
                peak_bytes = max(peak_bytes, peak)
        return self._memory_bytes - self._handoff_reserve_bytes - sum(weights.values()) - peak_bytes

    def compute_spare_bytes(self, replicas: Iterable[Replica]) -> int:
        """Bytes that one worker has left beside these weights; negative when they do not all fit at once."""
        return self._memory_bytes - self._handoff_reserve_bytes - sum_weights_bytes(self._times, replicas)

    def compute_peak_bytes(self, share: LoadShare, fit: Fit) -> int:
        """Bytes of activations of the largest stage of a request, D at the narrowest degree that fits."""
        degree = fit.min_degrees[share.shape]
        return compute_stages_peak_bytes(self._times, share.model, Stage, share.shape, degree)

    def fit(self, model: str, replica: VirtualReplica, shape: Shape) -> Fit | None:
        """The way in which one virtual replica runs one size; None when it never fits."""
        key = (model, replica, shape)
        if key not in self._fits:
            self._fits[key] = self.find_memory_model(model).fit(model, replica, [shape])
        return self._fits[key]

    def choose_first_replica(self, model: str, shape: Shape) -> VirtualReplica:
        """Algorithm 2, lines 3-4: the first feasible virtual replica. `PlacementError` when there is none."""
        for replica in VirtualReplica:
            if self.fit(model, replica, shape) is not None:
                return replica
        return self.find_memory_model(model).find_first_fit(model, [shape]).replica

    def compute_gpu_seconds(self, share: LoadShare, fit: Fit, stages: Iterable[Stage]) -> float:
        """GPU-seconds of some stages of one request, D at the narrowest degree that fits, E and C on one unit each."""
        total_s, degree = 0.0, fit.min_degrees[share.shape]
        for stage in sorted(stages):
            if stage is Stage.DIFFUSE:
                step_s = self._times.seconds(share.model, stage, share.shape, degree)
                total_s += degree * share.num_inference_steps * step_s
            else:
                unit = self._times.unit(share.model, stage)
                total_s += unit * self._times.seconds(share.model, stage, share.shape)
        return total_s

    def choose_rates(self, demand: ReplicaDemand, measured: MeasuredRates) -> dict[PlacementType, float]:
        """Requests per second and worker of the primary and of each auxiliary: as measured when all of them were (so
        that they were under one mix of requests), else from the profile."""
        if all((demand.model, kind) in measured for kind in demand.kinds):
            return {kind: measured[demand.model, kind] for kind in demand.kinds}
        requests = math.fsum(share.weight for share in demand.load)
        gpu_seconds = {
            kind: math.fsum(
                share.weight * self.compute_gpu_seconds(share, demand.fit, kind.stages) for share in demand.load
            )
            for kind in demand.kinds
        }
        return {kind: requests / seconds if seconds else _INSTANT_PER_S for kind, seconds in gpu_seconds.items()}

    def group_demands(self, load: Sequence[LoadShare], keep: Sequence[LoadShare] = ()) -> list[ReplicaDemand]:
        """The virtual replicas that the load needs, in a fixed order. Sizes of `keep` need none of their own while one
        that is there runs them: what they add to the work is next to nothing."""
        asked = [share for share in load if share.weight > 0]
        grouped: defaultdict[tuple[str, VirtualReplica], list[LoadShare]] = defaultdict(list)
        for share in asked:
            grouped[share.model, self.choose_first_replica(share.model, share.shape)].append(share)
        weight = _KEPT_WEIGHT * math.fsum(share.weight for share in asked)
        firsts = {share: self.choose_first_replica(share.model, share.shape) for share in keep}
        served = {(share.model, share.shape) for share in asked}
        # Those that need most come first, as their virtual replica may run the others.
        for share in sorted(
            firsts, key=lambda share: (firsts[share], share.shape, share.model, share.num_inference_steps), reverse=True
        ):
            if (share.model, share.shape) in served:
                continue
            served.add((share.model, share.shape))
            there = [replica for model, replica in grouped if model == share.model]
            able = [replica for replica in there if self.fit(share.model, replica, share.shape) is not None]
            first = firsts[share]
            grouped[share.model, first if first in able else min(able, default=first)].append(
                replace(share, weight=weight)
            )
        return [
            self.build_demand(model, shares) for (model, _), shares in sorted(grouped.items(), key=lambda item: item[0])
        ]

    def build_demand(self, model: str, load: Sequence[LoadShare]) -> ReplicaDemand:
        """One virtual replica for all of this load: the first that fits every request in it."""
        ordered = sorted(load, key=lambda share: (share.shape, share.num_inference_steps, share.weight))
        fit = self.find_memory_model(model).find_first_fit(model, list(dict.fromkeys(share.shape for share in ordered)))
        gpu_seconds = math.fsum(share.weight * self.compute_gpu_seconds(share, fit, Stage) for share in ordered)
        return ReplicaDemand(model, fit, tuple(ordered), gpu_seconds)

    def pool_demands(self, demands: Sequence[ReplicaDemand]) -> list[ReplicaDemand]:
        """One virtual replica per model: the first that runs all of its requests, but C stays off the primaries of a
        model that runs wide, as the leader of a group that decodes keeps its block of workers from being used."""
        merged = []
        for model in sorted({demand.model for demand in demands}):
            of_model = [demand for demand in demands if demand.model == model]
            if len(of_model) == 1 and of_model[0].fit.replica is VirtualReplica.V0:
                merged += of_model
            else:
                load = [share for demand in of_model for share in demand.load]
                merged.append(self._pool_model(model, load))
        return merged

    def _pool_model(self, model: str, load: Sequence[LoadShare]) -> ReplicaDemand:
        demand = self.build_demand(model, load)
        apart = None
        if demand.fit.replica is VirtualReplica.V1 and self._runs_wide(demand):
            shapes = list(demand.fit.min_degrees)
            apart = self.find_memory_model(model).fit(model, VirtualReplica.V2, shapes)
            apart = apart or self.find_memory_model(model).fit(model, VirtualReplica.V3, shapes)
        return demand if apart is None else replace(demand, fit=apart)

    def _runs_wide(self, demand: ReplicaDemand) -> bool:
        """True when most of the work is of sizes whose optimal degree is above 1."""
        work: Counter[bool] = Counter()
        for share in demand.load:
            is_wide = self._times.optimal_degree(share.model, Stage.DIFFUSE, share.shape) > 1
            work[is_wide] += share.weight * self.compute_gpu_seconds(share, demand.fit, Stage)  # type: ignore[assignment]
        return work[True] > work[False]

    def merge_demands(self, demands: Sequence[ReplicaDemand], num_workers: int) -> list[ReplicaDemand]:
        """While the smallest workable sets are more than the workers, let a model do with one virtual replica: the
        first that fits all of its requests. May still be too many."""
        left = list(demands)
        while sum(demand.minimum for demand in left) > num_workers:
            merged = {
                model: self.build_demand(model, [share for d in left if d.model == model for share in d.load])
                for model, n in Counter(demand.model for demand in left).items()
                if n > 1
            }
            if not merged:
                return left
            model = min(merged, key=lambda name: (merged[name].minimum, name))
            left = [demand for demand in left if demand.model != model] + [merged[model]]
        return left


def compute_stage_speeds(
    plan: PlacementPlan, load: Sequence[LoadShare], costs: ClusterCosts
) -> dict[frozenset[Replica], StageSpeed]:
    """The speed of each set of replicas: its workers, and the GPU-seconds per second that the load brings them.

    Every request counts where it communicates least: at the first virtual replica V0..V3 that fits it and that the plan
    has (TridentServe, arXiv 2510.02838, section 6.1). Workers of one type share its work evenly. Raises
    `PlacementError` for a request that the plan cannot run, `ProfileError` for one that is not profiled.
    """
    held = Counter(filter(None, plan.replicas.values()))
    holders: defaultdict[tuple[str, PlacementType], int] = defaultdict(int)
    for replicas, workers in held.items():
        for role in _find_roles(replicas):
            holders[role] += workers
    work: defaultdict[tuple[str, PlacementType], float] = defaultdict(float)
    squared: defaultdict[tuple[str, PlacementType], float] = defaultdict(float)
    for share in load:
        if share.weight > 0:
            fit = _find_fit(share, holders, costs)
            for kind in (fit.replica.primary, *fit.replica.auxiliaries):
                seconds = costs.compute_gpu_seconds(share, fit, kind.stages)
                work[share.model, kind] += share.weight * seconds
                squared[share.model, kind] += share.weight * seconds**2
    speeds = {}
    for replicas, workers in held.items():
        parts = {role: workers / holders[role] for role in _find_roles(replicas)}
        speeds[replicas] = StageSpeed(
            workers,
            sum(part * work[role] for role, part in parts.items()),
            sum(part**2 * squared[role] for role, part in parts.items()),
        )
    return speeds


def _find_roles(replicas: frozenset[Replica]) -> list[tuple[str, PlacementType]]:
    roles = []
    for model in sorted({replica.model for replica in replicas}):
        kind = PlacementType.of(replica.stage for replica in replicas if replica.model == model)
        if kind is not None:
            roles.append((model, kind))
    return roles


def _find_fit(share: LoadShare, holders: dict[tuple[str, PlacementType], int], costs: ClusterCosts) -> Fit:
    for replica in VirtualReplica:
        if all(holders.get((share.model, kind)) for kind in (replica.primary, *replica.auxiliaries)):
            fit = costs.fit(share.model, replica, share.shape)
            if fit is not None:
                return fit
    if holders.get((share.model, PlacementType.EDC)):
        fit = costs.find_memory_model(share.model).fit_apart(share.model, [share.shape])
        if fit is not None:
            return fit
    raise PlacementError(f"{share.model} at {share.shape} cannot run: no virtual replica of the placement fits it")
