"""E and C given D (TridentServe, arXiv 2510.02838, section 6.2, "Solution for E and C").

A stage that the primary holds runs there: E merges with D (it takes almost no time), C follows on the leader alone (it
gains little from more workers, and the others are free for the next request). Otherwise it goes to the auxiliary that
is idle or expected to be free first. It always goes to one: E and C are so insensitive to the degree that their optimal
degree is 1 in every profile we have.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

from dispatch.fits import Fits
from dispatch.pools import Pool
from tridentserve.plans import Replica, WorkerId
from tridentserve.protocols import StageTimes, WorkerView
from tridentserve.requests import Shape
from tridentserve.stages import Stage

# Seconds to move a stage's output to a worker of the same node, and of another one.
TransferSeconds = tuple[float, float]
_NO_TRANSFER = (0.0, 0.0)


class Auxiliaries:
    """The auxiliary workers of each model and stage, with the queues they will have after this tick's choices."""

    def __init__(self, pools: Sequence[Pool], fits: Fits, times: StageTimes, now_s: float) -> None:
        self._pools = pools
        self._fits = fits
        self._times = times
        self._now_s = now_s
        # What differs from the views: workers that this tick has given something, and loads it has caused.
        self._free_at_s: dict[WorkerId, float] = {}
        self._loaded: set[tuple[WorkerId, Replica]] = set()
        self._able: dict[tuple[str, Stage, Shape, int], tuple[WorkerView, ...]] = {}
        self._members: dict[tuple[int, ...], tuple[WorkerView, ...]] = {}
        self._queues: dict[tuple[int, Replica | None], _Queue] = {}

    @cached_property
    def _holders(self) -> dict[Replica, list[int]]:
        """The pools that hold a stage of a model but not its D."""
        holders: defaultdict[Replica, list[int]] = defaultdict(list)
        for number, pool in enumerate(self._pools):
            for replica in pool.replicas:
                if replica.model not in pool.types:
                    holders[replica].append(number)
        return holders

    def able(self, model: str, stage: Stage, shape: Shape, batch: int) -> tuple[WorkerView, ...]:
        """The workers that hold this stage but not D of the model, with the memory to run it at this size."""
        key = (model, stage, shape, batch)
        if key not in self._able:
            numbers = tuple(
                number
                for number in self._holders.get(Replica(model, stage), ())
                if self._fits.fits_auxiliary(self._pools[number], model, stage, shape, batch)
            )
            self._able[key] = self._workers_of(numbers)
        return self._able[key]

    def holders(self, model: str, stage: Stage) -> tuple[WorkerView, ...]:
        """The auxiliaries that hold this stage of a model, whatever their memory."""
        return self._workers_of(tuple(self._holders.get(Replica(model, stage), ())))

    def _workers_of(self, numbers: tuple[int, ...]) -> tuple[WorkerView, ...]:
        """One object per set of pools, so that all sizes share its queue."""
        if numbers not in self._members:
            self._members[numbers] = tuple(
                worker for number in numbers for node in self._pools[number].nodes for worker in node
            )
        return self._members[numbers]

    def free_at_s(self, candidates: Sequence[WorkerView], replica: Replica | None = None) -> float:
        """When the first of these workers is expected to be free, and to have loaded the replica."""
        return self._queue(candidates, replica).first()[0]

    def occupy(self, workers: Iterable[WorkerId], until_s: float) -> None:
        """Workers that a plan of this tick takes, which may be auxiliaries of another model."""
        for worker_id in workers:
            self._free_at_s[worker_id] = max(self._free_at_s.get(worker_id, until_s), until_s)

    def take(
        self,
        candidates: Sequence[WorkerView],
        ready_s: float,
        work_s: float,
        near: str,
        replica: Replica | None = None,
        transfer_s: TransferSeconds = _NO_TRANSFER,
    ) -> tuple[WorkerId, float]:
        """Queue `work_s` seconds at the worker that is free first (in node `near` when several are), to start no
        earlier than `ready_s` and the transfer to it. A worker without `replica` loads it first. Returns the worker and
        when its work is expected to end.

        The queue grows by the work alone: what waits for a long D leaves room for others before it.
        """
        queue = self._queue(candidates, replica)
        free_s, _ = first = queue.first()
        chosen = min((entry for entry in queue.entries_in(near) if entry[0] <= free_s), default=first)[1]
        is_near = queue.node_of(chosen) == near
        start_s = max(ready_s + transfer_s[0 if is_near else 1], free_s)
        self._free_at_s[chosen] = free_s + work_s
        if replica is not None:
            self._loaded.add((chosen, replica))
        return chosen, start_s + work_s

    def _queue(self, candidates: Sequence[WorkerView], replica: Replica | None) -> _Queue:
        key = (id(candidates), replica)
        if key not in self._queues:
            self._queues[key] = _Queue(self, candidates, replica)
        return self._queues[key]

    def ready_at_s(self, worker: WorkerView, replica: Replica | None) -> float:
        """When the worker is free, counting what this tick has given it, and has loaded the replica."""
        free_s = self._free_at_s.get(worker.worker_id)
        if free_s is None:
            free_s = self._now_s
        if not worker.idle:
            free_s = max(free_s, worker.free_at_s)
        if replica is None or worker.resident is None or replica in worker.resident:
            return free_s
        if (worker.worker_id, replica) in self._loaded:
            return free_s
        return free_s + self._times.load_seconds(replica.model, replica.stage)


class _Queue:
    """Some auxiliaries by when they are free. Times only grow within a tick, so an old entry is never too late."""

    def __init__(self, auxiliaries: Auxiliaries, workers: Sequence[WorkerView], replica: Replica | None) -> None:
        self._auxiliaries = auxiliaries
        self._replica = replica
        self._workers = workers  # also keeps the object, whose id names this queue
        self._by_id = {worker.worker_id: worker for worker in workers}
        self._heap = [(auxiliaries.ready_at_s(worker, replica), worker.worker_id) for worker in workers]
        heapq.heapify(self._heap)

    @cached_property
    def _in_node(self) -> dict[str, list[WorkerView]]:
        nodes: defaultdict[str, list[WorkerView]] = defaultdict(list)
        for worker in self._workers:
            nodes[worker.node_id].append(worker)
        return nodes

    def node_of(self, worker_id: WorkerId) -> str:
        return self._by_id[worker_id].node_id

    def first(self) -> tuple[float, WorkerId]:
        """The worker that is free first, by id among equals, and when."""
        while True:
            known_s, worker_id = self._heap[0]
            ready_s = self._auxiliaries.ready_at_s(self._by_id[worker_id], self._replica)
            if ready_s == known_s:
                return known_s, worker_id
            heapq.heapreplace(self._heap, (ready_s, worker_id))

    def entries_in(self, node: str) -> list[tuple[float, WorkerId]]:
        """The workers of one node, with when they are free."""
        return [
            (self._auxiliaries.ready_at_s(worker, self._replica), worker.worker_id)
            for worker in self._in_node.get(node, ())
        ]
