"""The simulated workers: what each has in memory, and which plans wait there."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.eviction import victims
from tridentserve.engine.simulated.actual_times import ActualTimes, PlanDemand, RankDemand
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica, StageSpan, WorkerId
from tridentserve.protocols import LoadSource
from tridentserve.requests import RequestSpec


@dataclass(slots=True, eq=False)
class PlanRun:
    """A plan that its workers have been given. `specs`: of its members.

    `heads`: at how many of its workers it is first in the queue. `ready_s`: when they know of it. Once it has started,
    `spans` are its stages as they will run, and `end_s` is its end. `version` grows when that is moved: what was
    entered in the agenda before does not count then. `saved_steps`: those done when its states were copied last."""

    plan: DispatchPlan
    specs: tuple[RequestSpec, ...]
    devices: tuple[Device, ...]
    demand: PlanDemand
    heads: int = 0
    ready_s: float = 0.0
    end_s: float = 0.0
    version: int = 0
    started_s: float | None = None
    spans: tuple[StageSpan, ...] = ()
    num_steps: int | None = None
    aborted: bool = False
    saved_steps: int = 0
    used_bytes: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Device:
    """One worker. `resident`: its replicas, the one used last at the end. `evicted`: not told to the scheduler yet.
    `loading_until_s`: what is on its way to it is there by then."""

    spec: WorkerSpec
    alive: bool = True
    incarnation: int = 0
    queue: deque[PlanRun] = field(default_factory=deque)
    wanted: frozenset[Replica] = frozenset()
    resident: dict[Replica, None] = field(default_factory=dict)
    resident_bytes: int = 0
    evicted: list[Replica] = field(default_factory=list)
    loading_until_s: float = 0.0

    @property
    def worker_id(self) -> WorkerId:
        return self.spec.worker_id


class Devices:
    """The workers of the cluster, and the memory that replicas take there."""

    def __init__(self, workers: Sequence[WorkerSpec], times: ActualTimes, reserve_bytes: int) -> None:
        """`reserve_bytes`: of each worker, kept free for the handoff buffer and process groups."""
        self._times = times
        self._reserve_bytes = reserve_bytes
        self._devices = {spec.worker_id: Device(spec) for spec in workers}
        # On how many workers of a node a replica is resident (of a divided one: its shard of that number).
        self._holders: Counter[tuple[str, Replica, int]] = Counter()

    def __getitem__(self, worker_id: WorkerId) -> Device:
        return self._devices[worker_id]

    def __iter__(self) -> Iterator[Device]:
        return iter(self._devices.values())

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._devices

    def place(self, placement: PlacementPlan) -> None:
        """Another placement is wanted. What is resident changes as plans need it."""
        for worker_id, device in self._devices.items():
            device.wanted = placement.replicas.get(worker_id, frozenset())

    def fill(self, device: Device) -> None:
        """Make the wanted replicas resident, as a worker does at its start; what does not fit stays out."""
        free_bytes = device.spec.memory_bytes - self._reserve_bytes
        for replica in sorted(device.wanted):
            if device.resident_bytes + self._times.weights_bytes(replica) <= free_bytes:
                self.add(device, replica)

    def clear(self, device: Device) -> None:
        """All that it held is gone."""
        for replica in list(device.resident):
            self._remove(device, replica)
        device.evicted.clear()
        device.loading_until_s = 0.0

    def unload(self, model: str) -> None:
        """Drop all replicas of a model, of which nothing runs any more."""
        for device in self:
            for replica in [replica for replica in device.resident if replica.model == model]:
                self._remove(device, replica)
            device.evicted = [replica for replica in device.evicted if replica.model != model]

    def add(self, device: Device, replica: Replica) -> None:
        device.resident[replica] = None
        device.resident_bytes += self._times.weights_bytes(replica)
        self._holders[self._shard(device, replica)] += 1

    def _shard(self, device: Device, replica: Replica) -> tuple[str, Replica, int]:
        """What a worker has of a replica, which other workers of its node may have too."""
        return device.spec.node_id, replica, device.spec.place % self._times.unit(replica)

    def source(self, device: Device, replica: Replica) -> LoadSource:
        """Where a replica that the worker lacks comes from."""
        return "peer" if self._holders[self._shard(device, replica)] > 0 else "host"

    def least_bytes(self, demand: RankDemand) -> int:
        """What a worker must have for a plan, with the handoff buffer."""
        return demand.weights_bytes + demand.peak_bytes + self._reserve_bytes

    def make_room(self, device: Device, demand: RankDemand) -> int:
        """Evict until what a plan needs fits beside what stays.

        Returns the bytes in use once the plan's replicas are there, with the peak and the handoff buffer."""
        resident, needs = device.resident, demand.replicas
        used_bytes = device.resident_bytes + demand.peak_bytes + self._reserve_bytes
        for replica in needs:
            if replica in resident:  # used now: to the end
                resident[replica] = resident.pop(replica)
            else:
                used_bytes += self._times.weights_bytes(replica)
        excess_bytes = used_bytes - device.spec.memory_bytes
        if excess_bytes <= 0:
            return used_bytes
        queued = set().union(*(run.demand.ranks[run.devices.index(device)].replicas for run in device.queue))
        for replica in victims(resident, needs, device.wanted, queued, self._times.weights_bytes, excess_bytes):
            used_bytes -= self._remove(device, replica)
            device.evicted.append(replica)
        return used_bytes

    def _remove(self, device: Device, replica: Replica) -> int:
        """Returns the bytes that are free now."""
        del device.resident[replica]
        self._holders[self._shard(device, replica)] -= 1
        num_bytes = self._times.weights_bytes(replica)
        device.resident_bytes -= num_bytes
        return num_bytes
