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
    """Workers to place: `count` of one type, for one model and one of its virtual replicas. At least `together` of
    them should share a node (the narrowest degree that memory allows). `beside`: what each holds of other models."""

    model: str
    replica: VirtualReplica
    kind: PlacementType
    count: int
    together: int = 1
    beside: frozenset[Replica] = frozenset()

    @property
    def held(self) -> frozenset[Replica]:
        """All that one of these workers holds."""
        return self.beside | {Replica(self.model, stage) for stage in self.kind.stages}


class _Nodes:
    """The workers that are still free, per node, and which virtual replicas each node hosts."""

    def __init__(self, workers: Sequence[WorkerSpec]) -> None:
        self.free: dict[str, list[WorkerId]] = defaultdict(list)
        for worker in sorted(workers, key=lambda w: (len(w.node_id), w.node_id, len(w.worker_id), w.worker_id)):
            self.free[worker.node_id].append(worker.worker_id)
        self.hosts: dict[str, set[tuple[str, VirtualReplica]]] = {node: set() for node in self.free}
        self.placed: dict[WorkerId, Group] = {}

    def give(self, node: str, group: Group, count: int) -> int:
        """Place up to `count` workers of the group in a node; how many that were."""
        chosen, self.free[node] = self.free[node][:count], self.free[node][count:]
        self.placed.update(dict.fromkeys(chosen, group))
        self.hosts[node].add((group.model, group.replica))
        return len(chosen)

    def whole_node(self, count: int) -> str | None:
        """The largest untouched node that `count` workers fill completely."""
        fitting = [node for node, free in self.free.items() if not self.hosts[node] and 0 < len(free) <= count]
        return max(fitting, key=lambda node: len(self.free[node]), default=None)

    def node_for(self, group: Group, count: int) -> str:
        """Where a remainder goes: a node that holds all of it and hosts its virtual replica, else one that holds all of
        it, the tightest first; else the one with most room."""
        kin = (group.model, group.replica)
        holding = [node for node, free in self.free.items() if len(free) >= count]
        if holding:
            return min(holding, key=lambda node: (kin not in self.hosts[node], len(self.free[node])))
        return max(self.free, key=lambda node: (len(self.free[node]), kin in self.hosts[node]))


def pack_per_machine(groups: Sequence[Group], workers: Sequence[WorkerSpec]) -> dict[WorkerId, Group]:
    """A group for every worker. The counts must sum to the number of workers, else `ValueError`.

    Whole nodes first, primaries before auxiliaries, those that must be together before others and larger groups before
    smaller ones; then the remainders, each beside its kind where that has room.
    """
    if sum(group.count for group in groups) != len(workers):
        raise ValueError(f"{sum(group.count for group in groups)} workers to place on {len(workers)}")
    nodes = _Nodes(workers)
    ordered = sorted(groups, key=_order)
    left = {group: group.count for group in ordered}
    for group in ordered:
        while left[group] and (node := nodes.whole_node(left[group])) is not None:
            left[group] -= nodes.give(node, group, left[group])
    for group in ordered:
        while left[group]:
            left[group] -= nodes.give(nodes.node_for(group, left[group]), group, left[group])
    return nodes.placed


def _order(group: Group) -> tuple[bool, int, int, str, VirtualReplica, PlacementType, list[Replica]]:
    is_auxiliary, others = not group.kind.is_primary, sorted(group.beside)
    return is_auxiliary, -group.together, -group.count, group.model, group.replica, group.kind, others
