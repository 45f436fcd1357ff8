"""PackPerMachine: which worker gets which placement type, so that nodes hold as few kinds as possible.

TridentServe, arXiv 2510.02838, appendix C.1. D plans never cross a node, so primaries of one kind belong together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tridentserve.cluster import WorkerSpec
from tridentserve.plans import Replica, WorkerId
from tridentserve.stages import PlacementType, VirtualReplica


@dataclass(frozen=True, slots=True)
class Group:
    """Workers to place: `count` of one type, for one model and one of its virtual replicas."""

    model: str
    """The model that they serve."""
    replica: VirtualReplica
    """The virtual replica that they are part of."""
    kind: PlacementType
    """Their placement type."""
    count: int
    """How many workers there are."""
    together: int = 1
    """At least this many should share a node: the narrowest degree that memory allows."""
    beside: frozenset[Replica] = frozenset()
    """What each of them holds of other models."""
    unit: int = 1
    """How many of them hold a stage's weights together. They fill a block of a node's places that is aligned to it."""

    @property
    def held(self) -> frozenset[Replica]:
        """All that one of these workers holds."""
        return self.beside | {Replica(self.model, stage) for stage in self.kind.stages}


class _Nodes:
    """The workers that are still free, per node, and which virtual replicas each node hosts."""

    def __init__(self, workers: Sequence[WorkerSpec]) -> None:
        self.free: dict[str, list[WorkerId]] = defaultdict(list)
        self._place = {worker.worker_id: worker.place for worker in workers}
        for worker in sorted(workers, key=lambda w: (len(w.node_id), w.node_id, len(w.worker_id), w.worker_id)):
            self.free[worker.node_id].append(worker.worker_id)
        self.hosts: dict[str, set[tuple[str, VirtualReplica]]] = {node: set() for node in self.free}
        self.placed: dict[WorkerId, Group] = {}

    def give(self, node: str, group: Group, count: int) -> int:
        """Place up to `count` workers of the group in a node; how many that were."""
        chosen = self.usable(node, group.unit)[:count]
        taken = set(chosen)
        self.free[node] = [worker_id for worker_id in self.free[node] if worker_id not in taken]
        self.placed.update(dict.fromkeys(chosen, group))
        self.hosts[node].add((group.model, group.replica))
        return len(chosen)

    def usable(self, node: str, unit: int) -> list[WorkerId]:
        """The free workers of a node, those only whose aligned block of `unit` places is free as a whole; whole blocks
        after one another."""
        free = self.free[node]
        if unit == 1:
            return free
        blocks: defaultdict[int, list[WorkerId]] = defaultdict(list)
        for worker_id in sorted(free, key=self._place.__getitem__):
            blocks[self._place[worker_id] // unit].append(worker_id)
        return [worker_id for block in blocks.values() if len(block) == unit for worker_id in block]

    def whole_node(self, count: int, unit: int) -> str | None:
        """The largest untouched node that `count` workers fill completely, but for what makes no unit."""
        sizes = {node: len(self.usable(node, unit)) for node in self.free if not self.hosts[node]}
        return max((node for node, size in sizes.items() if 0 < size <= count), key=sizes.__getitem__, default=None)

    def node_for(self, group: Group, count: int) -> str | None:
        """Where a remainder goes: a node that holds all of it and hosts its virtual replica, else one that holds all of
        it, the tightest first; else the one with most room. None where no node has a unit."""
        kin = (group.model, group.replica)
        sizes = {node: len(self.usable(node, group.unit)) for node in self.free}
        holding = [node for node, size in sizes.items() if size >= count]
        if holding:
            return min(holding, key=lambda node: (kin not in self.hosts[node], len(self.free[node])))
        most = max(sizes, key=lambda node: (sizes[node], kin in self.hosts[node]))
        return most if sizes[most] else None


def pack_per_machine(groups: Sequence[Group], workers: Sequence[WorkerSpec]) -> dict[WorkerId, Group]:
    """A group for every worker, but for those that are left where units do not come out even. `ValueError` when the
    counts sum to more than the workers, or to fewer without units.

    Whole nodes first, primaries before auxiliaries, those that must be together before others and larger groups before
    smaller ones; then the remainders, each next to its kind where that has room. Large units go before all others.
    """
    total, has_units = sum(group.count for group in groups), any(group.unit > 1 for group in groups)
    if total > len(workers) or (total < len(workers) and not has_units):
        raise ValueError(f"{total} workers to place on {len(workers)}")
    nodes = _Nodes(workers)
    ordered = sorted(groups, key=_order)
    left = {group: group.count for group in ordered}
    for group in ordered:
        while left[group] and (node := nodes.whole_node(left[group], group.unit)) is not None:
            left[group] -= nodes.give(node, group, left[group])
    for group in ordered:
        while left[group] and (node := nodes.node_for(group, left[group])) is not None:
            left[group] -= nodes.give(node, group, left[group])
    return nodes.placed


def _order(group: Group) -> tuple[int, bool, int, int, str, VirtualReplica, PlacementType, list[Replica]]:
    is_auxiliary, others = not group.kind.is_primary, sorted(group.beside)
    return -group.unit, is_auxiliary, -group.together, -group.count, group.model, group.replica, group.kind, others
