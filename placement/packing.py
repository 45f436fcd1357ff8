"""The assignment of replicas to workers: PackPerMachine, and replicas of several models on one worker.

PackPerMachine (TridentServe, arXiv 2510.02838, appendix C.1) fills nodes so that each holds as few placement types as
possible: D plans never cross a node, so primaries of one type belong together. Section 6.1 (Principle 2) gives each
stage workers in proportion to its rate, so that an encoder that needs a tenth of a worker gets a whole one. Here,
several such encoders share a worker when memory allows; and where there are fewer workers than the models need, each
worker holds as many models as fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.demands import ClusterCosts, ReplicaDemand
from placement.units import WorkerCounts
from tridentserve.cluster import WorkerSpec
from tridentserve.plans import Replica, WorkerId
from tridentserve.stages import PlacementType, VirtualReplica

# The part of a worker that roles may need together when they come to share it.
_MOST_USED = 0.9


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
    """The number of workers."""
    together: int = 1
    """At least this many should share a node: the narrowest degree that memory allows."""
    other_replicas: frozenset[Replica] = frozenset()
    """The replicas of other models that each of them holds."""
    unit: int = 1
    """The number of them that hold a stage's weights together. They fill an aligned block of a node's places."""

    @property
    def held(self) -> frozenset[Replica]:
        """All that one of these workers holds."""
        return self.other_replicas | {Replica(self.model, stage) for stage in self.kind.stages}


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
        """Place up to `count` workers of the group in a node and return their number."""
        chosen = self.list_usable(node, group.unit)[:count]
        taken = set(chosen)
        self.free[node] = [worker_id for worker_id in self.free[node] if worker_id not in taken]
        self.placed.update(dict.fromkeys(chosen, group))
        self.hosts[node].add((group.model, group.replica))
        return len(chosen)

    def list_usable(self, node: str, unit: int) -> list[WorkerId]:
        """The free workers of a node, those only whose aligned block of `unit` places is free as a whole; whole blocks
        after one another."""
        free = self.free[node]
        if unit == 1:
            return free
        blocks: defaultdict[int, list[WorkerId]] = defaultdict(list)
        for worker_id in sorted(free, key=self._place.__getitem__):
            blocks[self._place[worker_id] // unit].append(worker_id)
        return [worker_id for block in blocks.values() if len(block) == unit for worker_id in block]

    def find_whole_node(self, count: int, unit: int) -> str | None:
        """The largest untouched node that `count` workers fill completely, but for what makes no unit."""
        sizes = {node: len(self.list_usable(node, unit)) for node in self.free if not self.hosts[node]}
        return max((node for node, size in sizes.items() if 0 < size <= count), key=sizes.__getitem__, default=None)

    def find_node_for(self, group: Group, count: int) -> str | None:
        """The node that a remainder goes to: one that holds all of it and hosts its virtual replica, else one
        that holds all of it, the tightest first; else the one with most room. None where no node has a unit."""
        kin = (group.model, group.replica)
        sizes = {node: len(self.list_usable(node, group.unit)) for node in self.free}
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
        while left[group] and (node := nodes.find_whole_node(left[group], group.unit)) is not None:
            left[group] -= nodes.give(node, group, left[group])
    for group in ordered:
        while left[group] and (node := nodes.find_node_for(group, left[group])) is not None:
            left[group] -= nodes.give(node, group, left[group])
    return nodes.placed


def _order(group: Group) -> tuple[int, bool, int, int, str, VirtualReplica, PlacementType, list[Replica]]:
    is_auxiliary, others = not group.kind.is_primary, sorted(group.other_replicas)
    return -group.unit, is_auxiliary, -group.together, -group.count, group.model, group.replica, group.kind, others


@dataclass(slots=True)
class Portion:
    """The workers of one demand, by type."""

    demand: ReplicaDemand
    counts: WorkerCounts
    rates: Mapping[PlacementType, float]

    @property
    def primary(self) -> PlacementType:
        return self.demand.fit.replica.primary

    def compute_need(self, kind: PlacementType) -> float:
        """The number of workers of an auxiliary type that the primaries keep busy."""
        return self.counts[self.primary] * self.rates[self.primary] / self.rates[kind]

    @property
    def pressure(self) -> float:
        """GPU-seconds of all of its work per primary."""
        return self.demand.gpu_seconds / self.counts[self.primary]


@dataclass(frozen=True, slots=True)
class _Role:
    """The single worker of one auxiliary type of a portion."""

    portion: int
    kind: PlacementType


class _Sharing:
    """The roles of each worker, while they are being decided."""

    def __init__(self, portions: Sequence[Portion], costs: ClusterCosts) -> None:
        self.portions = portions
        self._costs = costs
        self.workers: list[list[_Role]] = []

    def compute_need(self, roles: Sequence[_Role]) -> float:
        return sum(self.portions[role.portion].compute_need(role.kind) for role in roles)

    def join(self) -> int:
        """First fit, those that need most first. Returns how many workers that spares."""
        lone = [
            _Role(index, kind)
            for index, portion in enumerate(self.portions)
            for kind in portion.demand.fit.replica.auxiliaries
            if portion.counts[kind] == 1
        ]
        for role in sorted(lone, key=lambda role: (-self.compute_need([role]), role.portion, role.kind)):
            host = next((roles for roles in self.workers if self._may_join(role, roles)), None)
            if host is None:
                self.workers.append([role])
            else:
                host.append(role)
        return len(lone) - len(self.workers)

    def _may_join(self, role: _Role, roles: Sequence[_Role]) -> bool:
        """E and C of one model stay apart: together they are no placement type."""
        demand = self.portions[role.portion].demand
        for other in roles:
            if self.portions[other.portion].demand.model == demand.model and other.kind != role.kind:
                return False
        together = [*roles, role]
        pairs = [(self.portions[one.portion].demand, one.kind) for one in together]
        return self.compute_need(together) <= _MOST_USED and self._costs.compute_room_bytes(pairs) >= 0

    def grow(self) -> bool:
        """Give a spared worker to the primaries with most work each, whose auxiliaries keep up with one more."""
        shared = {(role.portion, role.kind) for roles in self.workers for role in roles}
        for index, portion in sorted(enumerate(self.portions), key=lambda entry: -entry[1].pressure):
            if portion.demand.fit.units[portion.primary] > 1:
                continue  # one worker is no unit
            portion.counts[portion.primary] += 1
            own = [kind for kind in portion.demand.fit.replica.auxiliaries if (index, kind) not in shared]
            if all(portion.compute_need(kind) <= portion.counts[kind] for kind in own) and all(
                self.compute_need(roles) <= 1 for roles in self.workers if any(role.portion == index for role in roles)
            ):
                return True
            portion.counts[portion.primary] -= 1
        return False

    def part(self) -> None:
        """Undo the last joining of the worker with most roles."""
        self.workers.append([max(self.workers, key=len).pop()])


def group_portions(portions: Sequence[Portion], costs: ClusterCosts) -> list[Group]:
    """The groups to pack, as many workers as the portions count in all; workers that sharing spares are primaries."""
    sharing = _Sharing(portions, costs)
    for _ in range(sharing.join()):
        if not sharing.grow():
            sharing.part()
    shared = {(role.portion, role.kind): roles for roles in sharing.workers for role in roles}
    groups = []
    for index, portion in enumerate(portions):
        demand = portion.demand
        for kind, count in portion.counts.items():
            roles = shared.get((index, kind), [_Role(index, kind)])
            if roles[0] != _Role(index, kind):
                continue  # it is on the worker of another role
            other_replicas = frozenset(
                replica
                for role in roles[1:]
                for replica in _make_lone_group(portions[role.portion].demand, role.kind).held
                if replica.model != demand.model
            )
            unit = demand.fit.units[kind]
            together = demand.fit.min_degree if kind.is_primary else unit
            groups.append(Group(demand.model, demand.fit.replica, kind, count, together, other_replicas, unit))
    return groups


def _make_lone_group(demand: ReplicaDemand, kind: PlacementType) -> Group:
    return Group(demand.model, demand.fit.replica, kind, 1)


_Roles = list[tuple[ReplicaDemand, PlacementType]]


def stack_models(
    demands: Sequence[ReplicaDemand], workers: Sequence[WorkerSpec], costs: ClusterCosts
) -> Mapping[WorkerId, frozenset[Replica]] | None:
    """The replicas that each worker holds, or None when the smallest workable sets do not fit.

    `demands` has one virtual replica per model. Types go to the worker with the most room, those that leave least of it
    first; no worker gets two types of a model. Then further primaries go where there is still room, for the model with
    most work per primary. None too when a model needs several workers together: these would have to hold the same.
    """
    if any(demand.fit.min_degree > 1 or max(demand.fit.units.values()) > 1 for demand in demands):
        return None
    held: dict[WorkerId, _Roles] = {worker.worker_id: [] for worker in sorted(workers, key=_name)}
    items = [(demand, kind) for demand in demands for kind in demand.kinds]
    for demand, kind in sorted(items, key=lambda item: (costs.compute_room_bytes([item]), item[0].model, item[1])):
        if not _add(demand, kind, held, costs):
            return None
    primaries = dict.fromkeys((demand.model for demand in demands), 1)
    growing = list(demands)
    while growing:
        demand = max(growing, key=lambda demand: (demand.gpu_seconds / primaries[demand.model], demand.model))
        if _add(demand, demand.fit.replica.primary, held, costs):
            primaries[demand.model] += 1
        else:
            growing.remove(demand)
    return {
        worker_id: frozenset(Replica(demand.model, stage) for demand, kind in roles for stage in kind.stages)
        for worker_id, roles in held.items()
    }


def _add(demand: ReplicaDemand, kind: PlacementType, held: dict[WorkerId, _Roles], costs: ClusterCosts) -> bool:
    """Put a type on the worker that has most room left then. False when no worker has room."""
    rooms = [
        (costs.compute_room_bytes([*roles, (demand, kind)]), worker_id)
        for worker_id, roles in held.items()
        if all(other.model != demand.model for other, _ in roles)
    ]
    room, chosen = max(rooms, key=lambda entry: entry[0], default=(-1, ""))
    if room < 0:
        return False
    held[chosen].append((demand, kind))
    return True


def _name(worker: WorkerSpec) -> WorkerId:
    return worker.worker_id
