"""The simulated workers: what each has in memory, and which plans wait there."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.eviction import choose_victims
from tridentserve.engine.simulated.workers.actual_times import ActualTimes, PlanDemand, RankDemand
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica, StageSpan, WorkerId
from tridentserve.protocols import LoadSource
from tridentserve.requests import RequestSpec


@dataclass(slots=True, eq=False)
class PlanRun:
    """A plan that its workers have been given."""

    plan: DispatchPlan
    specs: tuple[RequestSpec, ...]
    """Its members' requests."""
    devices: tuple[Device, ...]
    """Its workers, in rank order."""
    demand: PlanDemand
    heads: int = 0
    """Number of its workers in whose queue it is first."""
    ready_s: float = 0.0
    """The time at which its workers know of it."""
    end_s: float = 0.0
    """The time at which it ends, once it has started."""
    version: int = 0
    """Grows when its end is moved. Calls in the agenda that were entered with an earlier version do nothing."""
    started_s: float | None = None
    spans: tuple[StageSpan, ...] = ()
    """Its stages as they will run, once it has started."""
    num_steps: int | None = None
    """Denoising steps after which it stops; None: it is carried out to its end."""
    aborted: bool = False
    saved_steps: int = 0
    """Denoising steps in its latest checkpoint."""
    used_bytes: tuple[int, ...] = ()
    """Memory in use on each worker while it runs, in rank order."""

    @property
    def steps_done(self) -> int:
        """Denoising steps of each member that it does."""
        return self.plan.num_steps if self.num_steps is None else self.num_steps


@dataclass(slots=True, eq=False)
class Device:
    """One worker."""

    spec: WorkerSpec
    alive: bool = True
    incarnation: int = 0
    queue: deque[PlanRun] = field(default_factory=deque)
    wanted: frozenset[Replica] = frozenset()
    """The replicas of its placement."""
    resident: dict[Replica, None] = field(default_factory=dict)
    """The replicas in its memory, the most recently used one last."""
    resident_bytes: int = 0
    evicted: list[Replica] = field(default_factory=list)
    """Replicas that have left its memory and are not reported to the scheduler yet."""
    loading_until_s: float = 0.0
    """The time at which the replicas that are being loaded are resident."""
    loras: tuple[str, ...] = ()
    """The LoRAs in its memory, the most recently used one last."""

    @property
    def worker_id(self) -> WorkerId:
        return self.spec.worker_id


class Devices:
    """The workers of the cluster, and the memory that replicas take there."""

    def __init__(self, workers: Sequence[WorkerSpec], times: ActualTimes, reserve_bytes: int) -> None:
        """`reserve_bytes`: memory of each worker that is kept free for the handoff buffer and process groups."""
        self._times = times
        self._reserve_bytes = reserve_bytes
        self._devices = {spec.worker_id: Device(spec) for spec in workers}
        # Number of workers of a node on which a replica is resident (in a unit: its shard of that number).
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
        """The worker has lost all its replicas."""
        for replica in list(device.resident):
            self._remove(device, replica)
        device.evicted.clear()
        device.loras = ()
        device.loading_until_s = 0.0

    def drop(self, device: Device, replicas: Iterable[Replica]) -> None:
        """The worker has these replicas no more, if it had them."""
        for replica in replicas:
            if replica in device.resident:
                self._remove(device, replica)

    def unload(self, model: str) -> None:
        """Drop all replicas of a model. No plan of it runs any more."""
        for device in self:
            for replica in [replica for replica in device.resident if replica.model == model]:
                self._remove(device, replica)
            device.evicted = [replica for replica in device.evicted if replica.model != model]
            device.loras = tuple(key for key in device.loras if not key.startswith(f"{model}:"))

    def add(self, device: Device, replica: Replica) -> None:
        device.resident[replica] = None
        device.resident_bytes += self._times.weights_bytes(replica)
        self._holders[self._shard(device, replica)] += 1

    def _shard(self, device: Device, replica: Replica) -> tuple[str, Replica, int]:
        """The shard of a replica that a worker holds. Other workers of its node may hold the same."""
        return device.spec.node_id, replica, device.spec.place % self._times.unit(replica)

    def source(self, device: Device, replica: Replica) -> LoadSource:
        """The place from which a replica is loaded that the worker lacks."""
        return "peer" if self._holders[self._shard(device, replica)] > 0 else "host"

    def least_bytes(self, demand: RankDemand) -> int:
        """Memory that a worker needs for a plan, with the handoff buffer."""
        return demand.weights_bytes + demand.peak_bytes + self._reserve_bytes

    def hold_loras(self, run: PlanRun, most: int) -> tuple[tuple[WorkerId, tuple[str, ...]], ...]:
        """The workers of a plan with D have had its LoRAs, and keep at most so many. Returns those whose LoRAs have
        changed, with what each holds now."""
        used = dict.fromkeys(key for spec in run.specs for key in spec.loras)
        told = []
        for device in run.devices if used else ():
            before = device.loras
            kept = (*(key for key in before if key not in used), *used)
            device.loras = kept[max(0, len(kept) - most) :]
            if set(device.loras) != set(before):
                told.append((device.worker_id, tuple(sorted(device.loras))))
        return tuple(told)

    def make_room(self, device: Device, demand: RankDemand) -> int:
        """Evict replicas until those of a plan fit.

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
        for replica in choose_victims(resident, needs, device.wanted, queued, self._times.weights_bytes, excess_bytes):
            used_bytes -= self._remove(device, replica)
            device.evicted.append(replica)
        return used_bytes

    def _remove(self, device: Device, replica: Replica) -> int:
        """Returns the bytes that this frees."""
        del device.resident[replica]
        self._holders[self._shard(device, replica)] -= 1
        num_bytes = self._times.weights_bytes(replica)
        device.resident_bytes -= num_bytes
        return num_bytes
