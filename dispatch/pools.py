"""Pools of interchangeable primaries, and which concrete workers of them a plan gets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tridentserve.plans import Replica, WorkerId
from tridentserve.protocols import WorkerView
from tridentserve.stages import PlacementType, Stage


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers that hold the same replicas in the same amount of memory, per node, sorted by id.

    `types` says which primary type they are for each model whose D they hold. A worker is in one pool even when it is
    a primary of several models, so two models can never be given it twice.
    """

    replicas: frozenset[Replica]
    types: Mapping[str, PlacementType]
    memory_bytes: int
    nodes: tuple[tuple[WorkerView, ...], ...]

    @property
    def largest_node(self) -> int:
        """The widest degree that an idle cluster could form here, powers of two aside."""
        return max(len(node) for node in self.nodes)

    @property
    def idle_per_node(self) -> tuple[int, ...]:
        return tuple(sum(worker.idle for worker in node) for node in self.nodes)

    def earliest_start_s(self, degree: int, now_s: float) -> float:
        """When `degree` workers of one node are expected to be free together; infinity when no node has as many."""
        starts_s = (
            sorted(now_s if worker.idle else worker.free_at_s for worker in node)[degree - 1]
            for node in self.nodes
            if len(node) >= degree
        )
        return max(now_s, min(starts_s, default=float("inf")))

    def first_free(self, degree: int, now_s: float) -> tuple[WorkerView, ...]:
        """The workers of one node that `earliest_start_s` speaks of; none when no node has as many."""

        def order(worker: WorkerView) -> tuple[float, bool, WorkerId]:
            return now_s if worker.idle else max(now_s, worker.free_at_s), not worker.idle, worker.worker_id

        groups = [tuple(sorted(node, key=order)[:degree]) for node in self.nodes if len(node) >= degree]
        return min(groups, key=lambda group: order(group[-1]), default=())


def primary_pools(workers: Iterable[WorkerView]) -> tuple[Pool, ...]:
    """The pools of all workers that hold D of some model, in an order that depends on the workers alone."""
    grouped: defaultdict[tuple[int, tuple[Replica, ...]], defaultdict[str, list[WorkerView]]]
    grouped = defaultdict(lambda: defaultdict(list))
    for worker in sorted(workers, key=lambda view: view.worker_id):
        if any(replica.stage is Stage.DIFFUSE for replica in worker.replicas):
            grouped[worker.memory_bytes, tuple(sorted(worker.replicas))][worker.node_id].append(worker)
    return tuple(
        Pool(
            replicas=frozenset(replicas),
            types=_primary_types(replicas),
            memory_bytes=memory_bytes,
            nodes=tuple(tuple(nodes[node_id]) for node_id in sorted(nodes)),
        )
        for (memory_bytes, replicas), nodes in sorted(grouped.items(), key=lambda item: item[0])
    )


def _primary_types(replicas: Sequence[Replica]) -> dict[str, PlacementType]:
    stages: defaultdict[str, set[Stage]] = defaultdict(set)
    for replica in replicas:
        stages[replica.model].add(replica.stage)
    types = {model: PlacementType.of(held) for model, held in stages.items() if Stage.DIFFUSE in held}
    return {model: kind for model, kind in types.items() if kind is not None}


class IdleWorkers:
    """Hands out the idle workers of one pool. Ask for wide slots first: then whatever `Problem.fits` is found."""

    def __init__(self, pool: Pool) -> None:
        self._members = [[worker.worker_id for worker in node] for node in pool.nodes]
        self._idle = [{worker.worker_id for worker in node if worker.idle} for node in pool.nodes]
        # Nodes by how many of their workers are idle, so that the best fit is found without a search over all nodes.
        self._by_idle: defaultdict[int, dict[int, None]] = defaultdict(dict)
        for node, idle in enumerate(self._idle):
            self._by_idle[len(idle)][node] = None

    def take(self, degree: int) -> tuple[WorkerId, ...] | None:
        """`degree` idle workers of the node with the fewest that suffice (best fit); None when no node has as many."""
        counts = [count for count, nodes in self._by_idle.items() if nodes and count >= degree]
        if not counts:
            return None
        fewest = min(counts)
        node = next(iter(self._by_idle[fewest]))
        chosen = _block(self._members[node], self._idle[node], degree)
        self._idle[node].difference_update(chosen)
        del self._by_idle[fewest][node]
        self._by_idle[fewest - degree][node] = None
        return chosen


def _block(members: Sequence[WorkerId], idle: set[WorkerId], degree: int) -> tuple[WorkerId, ...]:
    """Prefer an aligned block of the node's sorted workers (of 8: 4 pairs, 2 quads), from the smallest larger block
    that is broken already. So the same sets recur and their process groups are there, and wide blocks stay whole."""

    def is_idle(start: int, size: int) -> bool:
        return start + size <= len(members) and all(member in idle for member in members[start : start + size])

    def whole_block_around(start: int) -> int:
        size = degree
        while is_idle(start - start % (2 * size), 2 * size):
            size *= 2
        return size

    starts = [start for start in range(0, len(members), degree) if is_idle(start, degree)]
    if not starts:
        return tuple(sorted(idle)[:degree])
    start = min(starts, key=lambda start: (whole_block_around(start), start))
    return tuple(members[start : start + degree])
