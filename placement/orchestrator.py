"""The Dynamic Orchestrator: which stages each worker holds (Algorithm 2 of TridentServe, arXiv 2510.02838, 6.1)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.load import LoadShare
from placement.packing import Group, pack_per_machine
from placement.shares import largest_remainder
from placement.split import Counts, pad_to_degrees, smallest_workable, split
from placement.virtual_replicas import Fit, MemoryModel
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import PlacementError
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.protocols import StageTimes
from tridentserve.stages import Stage, VirtualReplica


@dataclass(frozen=True, slots=True)
class _Demand:
    """The requests that need one virtual replica of one model, and the GPU-seconds per second they bring."""

    model: str
    fit: Fit
    load: tuple[LoadShare, ...]
    gpu_seconds: float

    @property
    def minimum(self) -> int:
        return smallest_workable(self.fit.replica, self.fit.min_degree)


class Orchestrator:
    """Makes placement plans from stage times and a load. Pure: the same input gives the same plan.

    Differs from Algorithm 2 in one point: workers are shared in proportion to the GPU-seconds that requests of each
    virtual replica bring, not to their number. Otherwise a rare heavy model beside a light one would get next to
    nothing.
    """

    def __init__(self, times: StageTimes, handoff_reserve_bytes: int, degrees: Sequence[int]) -> None:
        """`degrees` are the degrees of D in use. Raises `PlacementError` for a negative reserve or bad degrees."""
        if handoff_reserve_bytes < 0:
            raise PlacementError(f"handoff_reserve_bytes is {handoff_reserve_bytes}; it must not be negative")
        if not degrees or any(degree < 1 or degree & (degree - 1) for degree in degrees):
            raise PlacementError(f"degrees are {list(degrees)}; give powers of two, such as 1, 2, 4")
        self._times = times
        self._handoff_reserve_bytes = handoff_reserve_bytes
        self._degrees = tuple(sorted(set(degrees)))

    def plan(self, load: Sequence[LoadShare], workers: Sequence[WorkerSpec], epoch: int = 0) -> PlacementPlan:
        """A plan that covers E, D and C of every model in the load.

        Every worker holds stages of one model, and the worker with the least memory decides what fits. Raises
        `PlacementError` when a size fits nowhere, when there are too few workers for the models, and for an empty
        load or cluster; `ProfileError` for a model or size that is not profiled.
        """
        _check(load, workers)
        demands = self._enough_workers(self._demands(load, workers), workers)
        weights = [demand.gpu_seconds for demand in demands]
        shares = largest_remainder(len(workers), weights, [demand.minimum for demand in demands])
        groups: list[Group] = []
        reasons: list[str] = []
        for demand, share in zip(demands, shares, strict=True):
            counts = self._split(demand, share, workers)
            groups += [
                Group(demand.model, demand.fit.replica, kind, n, demand.fit.min_degree if kind.is_primary else 1)
                for kind, n in counts.items()
            ]
            what = ", ".join(f"{n} {kind}" for kind, n in counts.items())
            part = demand.gpu_seconds / sum(weights)
            reasons.append(f"{demand.model} {demand.fit.replica} brings {part:.0%} of the work: {what}")
        placed = pack_per_machine(groups, workers)
        for demand in demands:
            _check_degree(demand, placed, workers)
        replicas = {
            worker.worker_id: frozenset(
                Replica(placed[worker.worker_id].model, stage) for stage in placed[worker.worker_id].kind.stages
            )
            for worker in workers
        }
        return PlacementPlan(replicas, reason="; ".join(reasons), epoch=epoch)

    def _demands(self, load: Sequence[LoadShare], workers: Sequence[WorkerSpec]) -> list[_Demand]:
        """Algorithm 2, lines 3-4: the first feasible virtual replica of each request."""
        grouped: defaultdict[tuple[str, VirtualReplica], list[LoadShare]] = defaultdict(list)
        for share in load:
            if share.weight > 0:
                fit = self._memory(share.model, workers).first_fit(share.model, [share.shape])
                grouped[share.model, fit.replica].append(share)
        return [self._demand(model, shares, workers) for (model, _), shares in sorted(grouped.items())]

    def _demand(self, model: str, load: Sequence[LoadShare], workers: Sequence[WorkerSpec]) -> _Demand:
        """One virtual replica for all of this load: the first that fits every request in it."""
        fit = self._memory(model, workers).first_fit(model, [share.shape for share in load])
        gpu_seconds = math.fsum(share.weight * self._gpu_seconds(share, fit, frozenset(Stage)) for share in load)
        return _Demand(model, fit, tuple(load), gpu_seconds)

    def _enough_workers(self, demands: list[_Demand], workers: Sequence[WorkerSpec]) -> list[_Demand]:
        """While the smallest workable sets are more than the workers, let a model do with one virtual replica: the
        first that fits all of its requests."""
        while sum(demand.minimum for demand in demands) > len(workers):
            merged = {
                model: self._demand(model, [s for d in demands if d.model == model for s in d.load], workers)
                for model, n in Counter(demand.model for demand in demands).items()
                if n > 1
            }
            if not merged:
                needs = ", ".join(f"{demand.model} {demand.fit.replica} {demand.minimum}" for demand in demands)
                raise PlacementError(f"{len(workers)} workers are too few; needed at least: {needs}. Add workers")
            model = min(merged, key=lambda name: (merged[name].minimum, name))
            demands = [demand for demand in demands if demand.model != model] + [merged[model]]
        return demands

    def _split(self, demand: _Demand, share: int, workers: Sequence[WorkerSpec]) -> Counts:
        """Lines 7-8: primaries and auxiliaries by their rates, primaries padded to the degrees a node can form."""
        replica = demand.fit.replica
        total = math.fsum(item.weight for item in demand.load)
        rates = {
            kind: total
            / math.fsum(item.weight * self._gpu_seconds(item, demand.fit, kind.stages) for item in demand.load)
            for kind in (replica.primary, *replica.auxiliaries)
        }
        counts = split(replica, share, rates, demand.fit.min_degree)
        return pad_to_degrees(replica, counts, rates, self._memory(demand.model, workers).degrees)

    def _gpu_seconds(self, share: LoadShare, fit: Fit, stages: frozenset[Stage]) -> float:
        """GPU-seconds of some stages of one request, D at the narrowest degree that fits."""
        total_s, degree = 0.0, fit.min_degrees[share.shape]
        for stage in sorted(stages):
            if stage is Stage.DIFFUSE:
                step_s = self._times.seconds(share.model, stage, share.shape, degree)
                total_s += degree * share.num_inference_steps * step_s
            else:
                total_s += self._times.seconds(share.model, stage, share.shape)
        return total_s

    def _memory(self, model: str, workers: Sequence[WorkerSpec]) -> MemoryModel:
        largest_node = max(Counter(worker.node_id for worker in workers).values())
        profiled = self._times.degrees(model, Stage.DIFFUSE)
        degrees = tuple(degree for degree in self._degrees if degree in profiled and degree <= largest_node)
        if not degrees:
            raise PlacementError(f"{model} was profiled at degrees {profiled}, in use are {self._degrees}; profile one")
        memory_bytes = min(worker.memory_bytes for worker in workers)
        return MemoryModel(self._times, memory_bytes, self._handoff_reserve_bytes, degrees)


def _check_degree(demand: _Demand, placed: Mapping[WorkerId, Group], workers: Sequence[WorkerSpec]) -> None:
    """Some node must have enough primaries together for the narrowest degree that memory allows."""
    primary, degree = (demand.model, demand.fit.replica.primary), demand.fit.min_degree
    together = Counter(
        worker.node_id
        for worker in workers
        if (placed[worker.worker_id].model, placed[worker.worker_id].kind) == primary
    )
    if max(together.values()) < degree:
        raise PlacementError(
            f"{demand.model} needs {degree} {primary[1]} workers in one node and gets {max(together.values())}; "
            f"add workers to a node, or give them more memory"
        )


def _check(load: Sequence[LoadShare], workers: Sequence[WorkerSpec]) -> None:
    if not workers:
        raise PlacementError("there are no workers to place stages on; add workers to the cluster")
    if not any(share.weight > 0 for share in load):
        raise PlacementError("the load is empty; name at least one model and size with a weight above 0")
    for worker in workers:
        if worker.memory_bytes <= 0:
            raise PlacementError(f"worker {worker.worker_id} has {worker.memory_bytes} bytes of memory; give it some")
    worker_id, n = Counter(worker.worker_id for worker in workers).most_common(1)[0]
    if n > 1:
        raise PlacementError(f"worker {worker_id} is in the cluster {n} times; ids must be unique")
