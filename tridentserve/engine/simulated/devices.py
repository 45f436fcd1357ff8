"""The simulated workers: what each has in memory, and which plans wait there."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated.truth import Truth
from tridentserve.events import StageSpan
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica, WorkerId
from tridentserve.protocols import LoadSource
from tridentserve.requests import RequestSpec
from tridentserve.stages import Stage


@dataclass(slots=True, eq=False)
class PlanRun:
    """A plan that its workers have been given. `specs`: of its members.

    `heads`: at how many of its workers it is first in the queue. `spans`: its stages as they will run, once it has
    started. `version` grows when its end is moved: what was entered in the agenda before does not count then."""

    plan: DispatchPlan
    specs: tuple[RequestSpec, ...]
    devices: tuple[Device, ...]
    heads: int = 0
    version: int = 0
    started_s: float | None = None
    spans: tuple[StageSpan, ...] = ()
    num_steps: int | None = None
    aborted: bool = False
    used_bytes: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Device:
    """One worker. `resident`: its replicas, the one used last at the end. `evicted`: not told to the scheduler yet."""

    spec: WorkerSpec
    alive: bool = True
    incarnation: int = 0
    queue: deque[PlanRun] = field(default_factory=deque)
    wanted: frozenset[Replica] = frozenset()
    resident: dict[Replica, None] = field(default_factory=dict)
    evicted: list[Replica] = field(default_factory=list)

    @property
    def worker_id(self) -> WorkerId:
        return self.spec.worker_id


class Devices(Mapping[WorkerId, Device]):
    """The workers of the cluster, and the memory that replicas take there."""

    def __init__(self, workers: Sequence[WorkerSpec], truth: Truth, reserve_bytes: int) -> None:
        """`reserve_bytes`: of each worker, kept free for the handoff buffer."""
        self._truth = truth
        self._reserve_bytes = reserve_bytes
        self._devices = {spec.worker_id: Device(spec) for spec in workers}
        # On how many workers of a node a replica is resident.
        self._holders: Counter[tuple[str, Replica]] = Counter()

    def __getitem__(self, worker_id: WorkerId) -> Device:
        return self._devices[worker_id]

    def __iter__(self) -> Iterable[WorkerId]:  # type: ignore[override]
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def place(self, placement: PlacementPlan) -> None:
        """Another placement is wanted. What is resident changes as plans need it."""
        for worker_id, device in self._devices.items():
            device.wanted = placement.replicas.get(worker_id, frozenset())

    def fill(self, device: Device) -> None:
        """Make the wanted replicas resident, as a worker does at its start; what does not fit stays out."""
        free_bytes = device.spec.memory_bytes - self._reserve_bytes
        for replica in sorted(device.wanted):
            free_bytes -= self._truth.weights_bytes(replica)
            if free_bytes >= 0:
                self.add(device, replica)

    def clear(self, device: Device) -> None:
        """All that it held is gone."""
        for replica in device.resident:
            self._holders[device.spec.node_id, replica] -= 1
        device.resident.clear()
        device.evicted.clear()

    def add(self, device: Device, replica: Replica) -> None:
        device.resident[replica] = None
        self._holders[device.spec.node_id, replica] += 1

    def source(self, device: Device, replica: Replica) -> LoadSource:
        """Where a replica that the worker lacks comes from."""
        return "peer" if self._holders[device.spec.node_id, replica] > 0 else "host"

    def needs(self, run: PlanRun, rank: int) -> list[Replica]:
        """The replicas that a plan needs on its worker with this rank."""
        plan = run.plan
        return [Replica(plan.model, stage) for stage in plan.stages if rank < self._truth.degree(plan, stage)]

    def peak_bytes(self, run: PlanRun, rank: int) -> int:
        """Peak activation bytes of a plan on its worker with this rank, over its stages."""
        plan = run.plan
        ran: list[Stage] = [stage for stage in plan.stages if rank < self._truth.degree(plan, stage)]
        return max((self._truth.peak_bytes(plan, stage, run.specs) for stage in ran), default=0)

    def least_bytes(self, replicas: Iterable[Replica], peak_bytes: int) -> int:
        """What a worker must have for these replicas, an activation peak and the handoff buffer."""
        return sum(map(self._truth.weights_bytes, replicas)) + peak_bytes + self._reserve_bytes

    def used_bytes(self, device: Device, peak_bytes: int) -> int:
        return self.least_bytes(device.resident, peak_bytes)

    def make_room(self, device: Device, needs: Collection[Replica], peak_bytes: int) -> None:
        """Evict until the needed replicas and the peak fit beside what stays: first what neither the placement nor a
        plan in the queue needs, then others, each time the one that has not been used for longest."""
        for replica in needs:
            if replica in device.resident:  # used now: to the end
                device.resident[replica] = device.resident.pop(replica)
        excess_bytes = self.least_bytes({**device.resident, **dict.fromkeys(needs)}, peak_bytes)
        excess_bytes -= device.spec.memory_bytes
        if excess_bytes <= 0:
            return
        others = [replica for replica in device.resident if replica not in needs]
        kept = device.wanted.union(*(self._queued_needs(device)))
        for replica in sorted(others, key=kept.__contains__):  # stable: the longest unused first
            if excess_bytes <= 0:
                return
            excess_bytes -= self._truth.weights_bytes(replica)
            del device.resident[replica]
            self._holders[device.spec.node_id, replica] -= 1
            device.evicted.append(replica)

    def _queued_needs(self, device: Device) -> list[list[Replica]]:
        return [self.needs(run, run.devices.index(device)) for run in device.queue]
