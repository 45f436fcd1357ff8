"""E and C given D (TridentServe, arXiv 2510.02838, section 6.2, "Solution for E and C").

A stage that the primary holds runs there: E merges with D (it takes almost no time), C follows on as many of D's
workers as are its optimal degree, as a rule the leader alone (it gains little from more; the others are free for the
next request). Otherwise it goes to the auxiliary that is idle or expected to be free first, or to a group of several:
as many as hold its weights together, or as its optimal degree says where that many are free as early.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache

from dispatch.workers.memory_fit import MemoryCheck
from dispatch.workers.pools import Pool
from tridentserve.plans import Replica, WorkerId
from tridentserve.protocols import StageTimes, WorkerView
from tridentserve.requests import Shape
from tridentserve.stages import Stage

# Seconds to move a stage's output to a worker of the same node, and of another one.
TransferSeconds = tuple[float, float]
_NO_TRANSFER = (0.0, 0.0)
# Workers that run a stage together, the leader first: one alone as a rule.
AuxiliaryGroup = tuple[WorkerView, ...]


class Auxiliaries:
    """The auxiliary workers of each model and stage, with the queues they will have after this tick's choices."""

    def __init__(
        self,
        pools: Sequence[Pool],
        node_of: Mapping[WorkerId, str],
        memory: MemoryCheck,
        times: StageTimes,
        now_s: float,
    ) -> None:
        """`node_of`: the node of each worker of the cluster."""
        self.node_of = node_of
        self._pools = pools
        self._memory = memory
        self._times = times
        self._now_s = now_s
        # The differences from the views: workers that this tick has given something, and loads it has caused.
        self._free_at_s: dict[WorkerId, float] = {}
        self._loaded: set[tuple[WorkerId, Replica]] = set()
        self._able: dict[tuple[str, Stage, Shape, int, int], tuple[AuxiliaryGroup, ...]] = {}
        self._groups: dict[tuple[tuple[int, ...], int], tuple[AuxiliaryGroup, ...]] = {}
        self._optimal: dict[tuple[str, Stage, Shape], int] = {}
        self._queues: dict[tuple[int, Replica | None], _Queue] = {}
        self._first_starts_s: dict[tuple[int, Replica], float] = {}

    @cached_property
    def _holders(self) -> dict[Replica, list[int]]:
        """The pools that hold a stage of a model but not its D."""
        holders: defaultdict[Replica, list[int]] = defaultdict(list)
        for number, pool in enumerate(self._pools):
            for replica in pool.replicas:
                if replica.model not in pool.types:
                    holders[replica].append(number)
        return holders

    def find_able(self, model: str, stage: Stage, shape: Shape, batch: int) -> tuple[AuxiliaryGroup, ...]:
        """The workers that hold this stage but not D of the model and have the memory to run it at this size (C in
        tiles, if no worker has it otherwise), in groups of as many as hold its weights together."""
        return self._find_able_at(model, stage, shape, batch, self._times.unit(model, stage))

    def find_best(self, model: str, stage: Stage, shape: Shape, batch: int) -> tuple[AuxiliaryGroup, ...]:
        """The groups of `find_able`, or those of the stage's optimal degree where one of those is free as early."""
        able = self.find_able(model, stage, shape, batch)
        optimal = self.optimal_degree(model, stage, shape)
        if able and optimal > len(able[0]):
            replica = name_replica(model, stage)
            wide = self._find_able_at(model, stage, shape, batch, optimal)
            if wide and self.free_at_s(wide, replica) <= self.free_at_s(able, replica):
                return wide
        return able

    def optimal_degree(self, model: str, stage: Stage, shape: Shape) -> int:
        """`StageTimes.optimal_degree`, asked once."""
        key = (model, stage, shape)
        if key not in self._optimal:
            is_narrow = self._times.degrees(model, stage)[-1] == 1
            self._optimal[key] = 1 if is_narrow else self._times.optimal_degree(model, stage, shape)
        return self._optimal[key]

    def _find_able_at(
        self, model: str, stage: Stage, shape: Shape, batch: int, width: int
    ) -> tuple[AuxiliaryGroup, ...]:
        key = (model, stage, shape, batch, width)
        if key not in self._able:
            numbers: tuple[int, ...] = ()
            for in_tiles in (False, True) if stage is Stage.DECODE else (False,):
                numbers = numbers or tuple(
                    number
                    for number in self._holders.get(name_replica(model, stage), ())
                    if self._memory.fits_auxiliary(self._pools[number], model, stage, shape, batch, in_tiles)
                )
            self._able[key] = self._list_groups(numbers, width)
        return self._able[key]

    def list_holders(self, model: str, stage: Stage) -> tuple[AuxiliaryGroup, ...]:
        """The auxiliaries that hold this stage of a model, whatever their memory."""
        return self._list_groups(tuple(self._holders.get(name_replica(model, stage), ())), 1)

    def _list_groups(self, numbers: tuple[int, ...], width: int) -> tuple[AuxiliaryGroup, ...]:
        """One object per set of pools and width, so that all sizes share its queue."""
        key = (numbers, width)
        if key not in self._groups:
            nodes = [node for number in numbers for node in self._pools[number].nodes]
            self._groups[key] = tuple(group for node in nodes for group in _form_groups(node, width))
        return self._groups[key]

    def free_at_s(self, candidates: Sequence[AuxiliaryGroup], replica: Replica | None = None) -> float:
        """The time at which the first of these groups is expected to be free, and to have loaded the replica."""
        return self._find_queue(candidates, replica).find_first()[0]

    def find_first_start_s(self, candidates: Sequence[AuxiliaryGroup], replica: Replica) -> float:
        """The time at which the first of these groups is expected to have done what it has begun, and to have loaded
        the replica: the start of a C that goes before all others. What this tick gives out is not counted."""
        key = (id(candidates), replica)
        if key not in self._first_starts_s:
            self._first_starts_s[key] = min(
                max(self._find_start_s(worker, replica) for worker in group) for group in candidates
            )
        return self._first_starts_s[key]

    def _find_start_s(self, worker: WorkerView, replica: Replica) -> float:
        start_s = self._now_s if worker.idle else max(self._now_s, worker.free_at_s - worker.promised_s)
        is_there = worker.resident is None or replica in worker.resident
        return start_s if is_there else start_s + self._times.load_seconds(replica.model, replica.stage)

    @property
    def are_any(self) -> bool:
        """True where some worker could be one."""
        return bool(self._holders)

    def occupy(self, workers: Iterable[WorkerId], until_s: float) -> None:
        """Workers that a plan of this tick takes, which may be auxiliaries of another model."""
        for worker_id in workers:
            self._free_at_s[worker_id] = max(self._free_at_s.get(worker_id, until_s), until_s)

    def take(
        self,
        candidates: Sequence[AuxiliaryGroup],
        ready_s: float,
        work_s: float,
        near: str,
        replica: Replica | None = None,
        transfer_s: TransferSeconds = _NO_TRANSFER,
    ) -> tuple[tuple[WorkerId, ...], float]:
        """Queue `work_s` seconds at the group that is free first (in node `near` when several are), to start no earlier
        than `ready_s` and the transfer to it. A worker without `replica` loads it first. Returns the workers and when
        their work is expected to end.

        The queue grows by the work alone: what waits for a long D leaves room for others before it.
        """
        queue = self._find_queue(candidates, replica)
        free_s, _ = first = queue.find_first()
        leader = min((entry for entry in queue.list_entries(near) if entry[0] <= free_s), default=first)[1]
        is_near = queue.find_node(leader) == near
        start_s = max(ready_s + transfer_s[0 if is_near else 1], free_s)
        chosen = queue.find_group(leader)
        for worker_id in chosen:
            self._free_at_s[worker_id] = free_s + work_s
            if replica is not None:
                self._loaded.add((worker_id, replica))
        return chosen, start_s + work_s

    def _find_queue(self, candidates: Sequence[AuxiliaryGroup], replica: Replica | None) -> _Queue:
        key = (id(candidates), replica)
        if key not in self._queues:
            self._queues[key] = _Queue(self, candidates, replica)
        return self._queues[key]

    def find_free_s(self, worker: WorkerView) -> float:
        """The time at which a worker is free, counting what this tick has given it."""
        free_s = self._free_at_s.get(worker.worker_id, self._now_s)
        return free_s if worker.idle else max(free_s, worker.free_at_s)

    def find_load_s(self, worker: WorkerView, replica: Replica) -> float:
        """Seconds until a worker that lacked a replica has it; 0 where this tick has had it loaded."""
        if (worker.worker_id, replica) in self._loaded:
            return 0.0
        return self._times.load_seconds(replica.model, replica.stage)


@lru_cache(maxsize=1 << 12)
def name_replica(model: str, stage: Stage) -> Replica:
    """The replica, as one object for all calls: dictionaries find it without comparing its fields."""
    return Replica(model, stage)


class _Queue:
    """Some groups by when they are free, named by their leaders. Times only grow in a tick, so no entry is too late."""

    def __init__(self, auxiliaries: Auxiliaries, groups: Sequence[AuxiliaryGroup], replica: Replica | None) -> None:
        self._auxiliaries = auxiliaries
        self._replica = replica
        self._groups = groups  # also keeps the object, whose id names this queue
        self._by_id = {group[0].worker_id: group for group in groups}
        self._lacking = set() if replica is None else _list_lacking(groups, replica)
        self._heap = [(self._find_ready_s(group), group[0].worker_id) for group in groups]
        heapq.heapify(self._heap)

    @cached_property
    def _in_node(self) -> dict[str, list[AuxiliaryGroup]]:
        nodes: defaultdict[str, list[AuxiliaryGroup]] = defaultdict(list)
        for group in self._groups:
            nodes[group[0].node_id].append(group)
        return nodes

    def find_node(self, leader: WorkerId) -> str:
        return self._by_id[leader][0].node_id

    def find_group(self, leader: WorkerId) -> tuple[WorkerId, ...]:
        return tuple([worker.worker_id for worker in self._by_id[leader]])

    def find_first(self) -> tuple[float, WorkerId]:
        """The group that is free first, by its leader's id among equals, and when."""
        while True:
            known_s, worker_id = self._heap[0]
            ready_s = self._find_ready_s(self._by_id[worker_id])
            if ready_s == known_s:
                return known_s, worker_id
            heapq.heapreplace(self._heap, (ready_s, worker_id))

    def list_entries(self, node: str) -> list[tuple[float, WorkerId]]:
        """The groups in one node, with when they are free."""
        return [(self._find_ready_s(group), group[0].worker_id) for group in self._in_node.get(node, ())]

    def _find_ready_s(self, group: AuxiliaryGroup) -> float:
        """The time at which the group is free, counting what this tick has given it, and has loaded the replica."""
        if len(group) == 1 and not self._lacking:
            return self._auxiliaries.find_free_s(group[0])
        return max([self._find_worker_ready_s(worker) for worker in group])

    def _find_worker_ready_s(self, worker: WorkerView) -> float:
        free_s = self._auxiliaries.find_free_s(worker)
        if self._replica is None or worker.worker_id not in self._lacking:
            return free_s
        return free_s + self._auxiliaries.find_load_s(worker, self._replica)


def _list_lacking(groups: Sequence[AuxiliaryGroup], replica: Replica) -> set[WorkerId]:
    """The workers that do not have a replica in memory; there are few different sets of what workers have there."""
    residents = {worker.resident for group in groups for worker in group if worker.resident is not None}
    without = {resident for resident in residents if replica not in resident}
    if not without:
        return set()
    return {worker.worker_id for group in groups for worker in group if worker.resident in without}


def _form_groups(node: Sequence[WorkerView], width: int) -> Iterable[AuxiliaryGroup]:
    """The aligned blocks of `width` places that the workers of a node fill."""
    if width == 1:
        return [(worker,) for worker in node]
    blocks: defaultdict[int, list[WorkerView]] = defaultdict(list)
    for worker in sorted(node, key=lambda worker: worker.place):
        blocks[worker.place // width].append(worker)
    return [tuple(block) for block in blocks.values() if len(block) == width]
