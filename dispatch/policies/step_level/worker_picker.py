"""Picks the idle workers of a pool that a step-level policy uses: those that a request had, else aligned blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from dispatch.workers.pools import IdleWorkers, Pool
from tridentserve.plans import WorkerId


class WorkerPicker:
    """The idle workers of one pool, handed out in any order of calls. Keep first, it is cheapest so."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._idle = {worker.worker_id for node in pool.nodes for worker in node if worker.idle}
        self._node = {
            worker.worker_id: tuple(each.worker_id for each in node) for node in pool.nodes for worker in node
        }
        self._blocks: IdleWorkers | None = None

    @property
    def num_idle(self) -> int:
        """The number of workers that are left."""
        return len(self._idle)

    def holds(self, worker_id: WorkerId) -> bool:
        """True when the worker is of this pool."""
        return worker_id in self._node

    def find_node(self, worker_id: WorkerId) -> WorkerId:
        """The first worker of a worker's node, which names the node."""
        return self._node[worker_id][0]

    def count_idle_in_node(self, worker_id: WorkerId) -> int:
        """The number of workers that are left in the node of this one."""
        return sum(member in self._idle for member in self._node[worker_id])

    def keep(self, workers: Iterable[WorkerId]) -> bool:
        """Take exactly these workers if all are idle (TetriServe, section 4.2.3, "placement preservation")."""
        wanted = set(workers)
        if not wanted or not wanted <= self._idle:
            return False
        self._idle -= wanted
        self._blocks = None
        return True

    def take(self, degree: int, preferred: Collection[WorkerId] = ()) -> tuple[WorkerId, ...] | None:
        """An aligned block of the node that it fits best, with as many of the `preferred` as can be; None when no node
        has as many. Ask for wide ones first."""
        if self._blocks is None:
            nodes = tuple(
                tuple(replace(worker, idle=worker.worker_id in self._idle) for worker in node)
                for node in self._pool.nodes
            )
            self._blocks = IdleWorkers(replace(self._pool, nodes=nodes))
        taken = self._blocks.take(degree, preferred)
        self._idle.difference_update(taken or ())
        return taken
