"""Picks the idle workers of a pool that a step-level policy uses: those that a request had, else aligned blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cached_property

from dispatch.workers.idle_workers import IdleWorkers
from dispatch.workers.pools import Pool
from tridentserve.plans import WorkerId


class WorkerPicker(IdleWorkers):
    """The idle workers of one pool, handed out in any order of calls. Pools of step-level policies have units of one
    worker."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.num_idle = sum(pool.idle_per_node)
        """The number of workers that are left."""
        self._in_order = True

    @cached_property
    def _number_of(self) -> dict[WorkerId, int]:
        """The number of each worker's node."""
        return {worker.worker_id: number for number, node in enumerate(self._nodes) for worker in node}

    def holds(self, worker_id: WorkerId) -> bool:
        """True when the worker is of this pool."""
        return worker_id in self._number_of

    def find_node(self, worker_id: WorkerId) -> WorkerId:
        """The first worker of a worker's node, which names the node."""
        return self._nodes[self._number_of[worker_id]][0].worker_id

    def count_idle_in_node(self, worker_id: WorkerId) -> int:
        """The number of workers that are left in the node of this one."""
        return self._count_idle(self._number_of[worker_id]).bit_count()

    def keep(self, workers: Sequence[WorkerId]) -> bool:
        """Take exactly these workers if all are idle (TetriServe, section 4.2.3, "placement preservation")."""
        wanted: defaultdict[int, int] = defaultdict(int)
        for worker_id in workers:
            if (place := self._find_place(worker_id)) is None:
                return False
            wanted[place[0]] |= 1 << place[1]
        if not wanted or any(bits & ~self._count_idle(number) for number, bits in wanted.items()):
            return False
        for number, bits in wanted.items():
            idle = self._count_idle(number)
            del self._by_idle[idle.bit_count()][number]
            self._idle[number] = left = idle & ~bits
            self._by_idle[left.bit_count()][number] = None
        self.num_idle -= len(workers)
        self._in_order = False
        return True

    def set_aside(self, worker_id: WorkerId, count: int) -> None:
        """Hand out so many idle workers of the node of this one no more, or all of its idle ones where those are
        fewer."""
        number = self._number_of[worker_id]
        idle = self._count_idle(number)
        workers = [each.worker_id for place, each in enumerate(self._nodes[number]) if idle >> place & 1]
        self.keep(workers[:count])

    def take(
        self, degree: int, preferred: Collection[WorkerId] = (), liked: Collection[WorkerId] = ()
    ) -> tuple[WorkerId, ...] | None:
        """An aligned block of the node that it fits best, with as many of the `preferred` as can be, and then of the
        `liked`; None when no node has as many. Ask for wide ones first."""
        if not self._in_order:
            # Of nodes with as many idle workers, the first is taken, until some have been taken from: they come last.
            # That order does not outlive a set that is kept.
            self._by_idle = [dict.fromkeys(sorted(numbers)) for numbers in self._by_idle]
            self._in_order = True
        taken = super().take(degree, preferred, liked)
        self.num_idle -= len(taken or ())
        return taken
