"""The workers in pools, kept from tick to tick: only what has changed is looked at again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dispatch.workers.pools import Pool, UnitOf, count_alone, group_into_pools
from tridentserve.plans import WorkerId
from tridentserve.protocols import WorkerView


@dataclass(frozen=True, slots=True)
class _PoolLayout:
    """The positions of workers: per pool and node, their indices in the list of all; per worker, its pool."""

    members: tuple[tuple[tuple[int, ...], ...], ...]
    pool_of: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """All pools of one moment, those of auxiliaries too. Made by `take_snapshot`."""

    workers: Sequence[WorkerView]
    all_pools: tuple[Pool, ...]
    _layout: _PoolLayout
    _unit_of: UnitOf = count_alone

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of primaries."""
        return tuple(pool for pool in self.all_pools if pool.types)

    def update(self, workers: Sequence[WorkerView]) -> WorkerSnapshot:
        """The snapshot of these views, equal to what `take_snapshot` gives. Pools without a change are shared with this
        one, and a worker without a change has the same view object."""
        if len(workers) != len(self.workers):
            return take_snapshot(workers, self._unit_of)
        changed = {
            place: worker
            for place, (worker, old) in enumerate(zip(workers, self.workers, strict=True))
            if worker is not old
        }
        if any(not _is_same_place(worker, self.workers[place]) for place, worker in changed.items()):
            return take_snapshot(workers, self._unit_of)
        return self._with(changed)

    def replace_views(self, views: Mapping[WorkerId, WorkerView]) -> WorkerSnapshot:
        """The snapshot with other views of some workers, which hold the same and are in the same place."""
        ids = views.keys()
        return self._with(
            {place: views[old.worker_id] for place, old in enumerate(self.workers) if old.worker_id in ids}
        )

    def _with(self, changed: Mapping[int, WorkerView]) -> WorkerSnapshot:
        if not changed:
            return self
        workers = list(self.workers)
        for place, worker in changed.items():
            workers[place] = worker
        pools = list(self.all_pools)
        for number in {self._layout.pool_of[place] for place in changed}:
            nodes = [tuple([workers[place] for place in node]) for node in self._layout.members[number]]
            pools[number] = replace(pools[number], nodes=tuple(nodes))
        return WorkerSnapshot(workers, tuple(pools), self._layout, self._unit_of)


def take_snapshot(workers: Sequence[WorkerView], unit_of: UnitOf = count_alone) -> WorkerSnapshot:
    """The workers, grouped anew."""
    all_pools = group_into_pools(workers, unit_of)
    places = {worker.worker_id: place for place, worker in enumerate(workers)}
    members = tuple(
        tuple(tuple(places[worker.worker_id] for worker in node) for node in pool.nodes) for pool in all_pools
    )
    pool_of = {place: number for number, nodes in enumerate(members) for node in nodes for place in node}
    layout = _PoolLayout(members, tuple(pool_of[place] for place in range(len(workers))))
    return WorkerSnapshot(list(workers), all_pools, layout, unit_of)


def _is_same_place(worker: WorkerView, other: WorkerView) -> bool:
    """True when a worker is in the same node and pool as before."""
    return (
        worker.worker_id == other.worker_id
        and worker.node_id == other.node_id
        and worker.memory_bytes == other.memory_bytes
        and (worker.replicas is other.replicas or worker.replicas == other.replicas)
    )
