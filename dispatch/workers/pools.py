"""Pools of interchangeable workers.

A snapshot keeps the pools from tick to tick: only what has changed is looked at again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tridentserve.plans import Replica, WorkerId
from tridentserve.protocols import WorkerView
from tridentserve.stages import PlacementType, Stage


@dataclass(frozen=True)
class Pool:
    """Workers that are interchangeable: they hold the same replicas in the same amount of memory.

    A worker is in one pool even when it is a primary of several models, so two models can never be given it twice.
    """

    replicas: frozenset[Replica]
    """The replicas that each of the workers holds."""
    types: Mapping[str, PlacementType]
    """The primary type that they are for each model whose D they hold; empty for auxiliaries."""
    memory_bytes: int
    """The memory of each worker."""
    nodes: tuple[tuple[WorkerView, ...], ...]
    """The workers of each node, in the order of their places."""
    unit: int = 1
    """Number of workers that hold the weights of a stage together, the largest of all their stages. They are given out,
    and count as idle, in whole units only (TridentServe, arXiv 2510.02838, appendix E.2): `unit` workers that follow
    each other in a node. Workers whose unit is not whole are in pools that hold nothing."""

    @cached_property
    def largest_node(self) -> int:
        """The widest degree that an idle cluster could form here, powers of two aside."""
        return max(len(node) for node in self.nodes)

    @cached_property
    def idle_per_node(self) -> tuple[int, ...]:
        """Workers of units that are idle as a whole."""
        if self.unit == 1:
            return tuple([sum([worker.idle for worker in node]) for node in self.nodes])
        return tuple([self.unit * sum([_is_idle(unit) for unit in self.list_units(node)]) for node in self.nodes])

    def list_units(self, node: Sequence[WorkerView]) -> list[tuple[WorkerView, ...]]:
        """The workers of a node of this pool by units."""
        return [tuple(node[start : start + self.unit]) for start in range(0, len(node), self.unit)]

    @cached_property
    def is_resident(self) -> bool:
        """True when every worker has all of its placement in memory."""
        return all(
            worker.resident is None or worker.resident is worker.replicas or worker.replicas <= worker.resident
            for node in self.nodes
            for worker in node
        )

    @cached_property
    def free_at_s(self) -> tuple[list[float], ...]:
        """The times at which the units of each node are free, ascending; 0 for those that are idle."""
        if self.unit == 1:
            return tuple([sorted([0.0 if worker.idle else worker.free_at_s for worker in node]) for node in self.nodes])
        return tuple([sorted([_free_at_s(unit) for unit in self.list_units(node)]) for node in self.nodes])

    def earliest_start_s(self, degree: int, now_s: float) -> float:
        """The time at which `degree` workers of one node are expected to be free together; infinity when no node has as
        many."""
        if max(self.idle_per_node) >= degree:
            return now_s
        units = degree // self.unit
        starts_s = [free_at_s[units - 1] for free_at_s in self.free_at_s if len(free_at_s) >= units]
        return max(now_s, min(starts_s, default=float("inf")))

    def find_first_free(self, degree: int, now_s: float) -> tuple[WorkerView, ...]:
        """The workers of one node that `earliest_start_s` speaks of; none when no node has as many."""

        groups = [self._sort_units(node, now_s)[: degree // self.unit] for node in self.nodes if len(node) >= degree]
        chosen = min(groups, key=lambda group: _order_unit(group[-1], now_s), default=[])
        return tuple(worker for unit in chosen for worker in unit)

    def list_first_free(self, number: int, degree: int, now_s: float) -> list[WorkerView]:
        """The `degree` workers of the node of this number that are free first."""
        units = self._sort_units(self.nodes[number], now_s)[: degree // self.unit]
        return [worker for unit in units for worker in unit]

    def _sort_units(self, node: Sequence[WorkerView], now_s: float) -> list[tuple[WorkerView, ...]]:
        return sorted(self.list_units(node), key=lambda unit: _order_unit(unit, now_s))


def _order_unit(unit: Sequence[WorkerView], now_s: float) -> tuple[float, bool, WorkerId]:
    """The order in which units are free."""
    return max(now_s, _free_at_s(unit)), not _is_idle(unit), unit[0].worker_id


def _is_idle(unit: Sequence[WorkerView]) -> bool:
    return all(worker.idle for worker in unit)


def _free_at_s(unit: Sequence[WorkerView]) -> float:
    return max(0.0 if worker.idle else worker.free_at_s for worker in unit)


# Gives the largest number of workers that hold the weights of one of these stages together.
UnitOf = Callable[[frozenset[Replica]], int]


def count_alone(replicas: frozenset[Replica]) -> int:
    """Each worker holds the weights of its stages by itself."""
    return 1


def group_into_pools(workers: Iterable[WorkerView], unit_of: UnitOf = count_alone) -> tuple[Pool, ...]:
    """All workers in pools, in an order that depends on the workers alone, not on theirs."""
    pooled: defaultdict[tuple[int, frozenset[Replica]], defaultdict[str, list[WorkerView]]]
    pooled = defaultdict(lambda: defaultdict(list))
    for worker in workers:
        pooled[worker.memory_bytes, worker.replicas][worker.node_id].append(worker)
    keys = sorted((memory_bytes, tuple(sorted(replicas))) for memory_bytes, replicas in pooled)
    pools: list[Pool] = []
    for memory_bytes, replicas in keys:
        held = frozenset(replicas)
        nodes, types = pooled[memory_bytes, held], _find_primary_types(replicas)
        if (unit := unit_of(held)) == 1:
            pools.append(Pool(held, types, memory_bytes, _sort_nodes(nodes)))
            continue
        whole, broken = _split_by_units(nodes, unit)
        if whole:
            pools.append(Pool(held, types, memory_bytes, whole, unit))
        if broken:
            pools.append(Pool(frozenset(), {}, memory_bytes, broken))
    return tuple(pools)


def _sort_nodes(nodes: Mapping[str, list[WorkerView]]) -> tuple[tuple[WorkerView, ...], ...]:
    return tuple(tuple(sorted(nodes[node_id], key=_find_position)) for node_id in sorted(nodes))


def _find_position(worker: WorkerView) -> tuple[int, WorkerId]:
    return worker.place, worker.worker_id


def _split_by_units(
    nodes: Mapping[str, list[WorkerView]], unit: int
) -> tuple[tuple[tuple[WorkerView, ...], ...], tuple[tuple[WorkerView, ...], ...]]:
    """The workers whose units are whole and the others, per node, in the order of their places."""
    whole, broken = [], []
    for node_id in sorted(nodes):
        members = sorted(nodes[node_id], key=_find_position)
        places = Counter(worker.place // unit for worker in members)
        whole.append(tuple(worker for worker in members if places[worker.place // unit] == unit))
        broken.append(tuple(worker for worker in members if places[worker.place // unit] != unit))
    return tuple(filter(None, whole)), tuple(filter(None, broken))


def _find_primary_types(replicas: Sequence[Replica]) -> dict[str, PlacementType]:
    stages: defaultdict[str, set[Stage]] = defaultdict(set)
    for replica in replicas:
        stages[replica.model].add(replica.stage)
    types = {model: PlacementType.of(held) for model, held in stages.items() if Stage.DIFFUSE in held}
    return {model: kind for model, kind in types.items() if kind is not None}


@dataclass(frozen=True, slots=True)
class _PoolLayout:
    """The positions of workers: per pool and node, their indices in the list of all; per worker, its pool,
    and its node by its id."""

    members: tuple[tuple[tuple[int, ...], ...], ...]
    pool_of: tuple[int, ...]
    node_of: Mapping[WorkerId, str]


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

    @property
    def node_of(self) -> Mapping[WorkerId, str]:
        """The node of each worker."""
        return self._layout.node_of

    def update(self, workers: Sequence[WorkerView]) -> WorkerSnapshot:
        """The snapshot of these views, equal to what `take_snapshot` gives. Pools without a change are shared with this
        one, and a worker without a change has the same view object."""
        if len(workers) != len(self.workers):
            return take_snapshot(workers, self._unit_of)
        changed: dict[int, WorkerView] = {}
        for place, (worker, old) in enumerate(zip(workers, self.workers, strict=True)):
            if worker is not old:
                if not _is_same_place(worker, old):
                    return take_snapshot(workers, self._unit_of)
                changed[place] = worker
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
    layout = _PoolLayout(members, tuple(pool_of[place] for place in range(len(workers))), map_to_nodes(all_pools))
    return WorkerSnapshot(list(workers), all_pools, layout, unit_of)


def make_busy(worker: WorkerView, until_s: float) -> WorkerView:
    """The worker as others see it while it is kept for a request that would end there at `until_s`."""
    return replace(worker, idle=False, free_at_s=max(until_s, worker.free_at_s))


def map_to_nodes(pools: Iterable[Pool]) -> dict[WorkerId, str]:
    """The node of each worker of some pools."""
    return {worker.worker_id: worker.node_id for pool in pools for node in pool.nodes for worker in node}


def _is_same_place(worker: WorkerView, other: WorkerView) -> bool:
    """True when a worker is in the same node and pool as before."""
    return (
        worker.worker_id == other.worker_id
        and worker.node_id == other.node_id
        and worker.memory_bytes == other.memory_bytes
        and (worker.replicas is other.replicas or worker.replicas == other.replicas)
    )
