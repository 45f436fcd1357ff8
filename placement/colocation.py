"""Models on top of each other: a placement for fewer workers than the models' smallest workable sets, where workers
hold replicas of several models as far as memory allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placement.demands import ClusterCosts, Demand
from tridentserve.cluster import WorkerSpec
from tridentserve.plans import Replica, WorkerId
from tridentserve.stages import PlacementType

_Roles = list[tuple[Demand, PlacementType]]


def stacked(
    demands: Sequence[Demand], workers: Sequence[WorkerSpec], costs: ClusterCosts
) -> Mapping[WorkerId, frozenset[Replica]] | None:
    """What each worker holds, or None when the smallest workable sets do not fit.

    `demands` has one virtual replica per model. Types go to the worker with the most room, those that leave least of it
    first; no worker gets two types of a model. Then further primaries go where there is still room, for the model with
    most work per primary. None too when a model needs several workers together: these would have to hold the same.
    """
    if any(demand.fit.min_degree > 1 or max(demand.fit.units.values()) > 1 for demand in demands):
        return None
    held: dict[WorkerId, _Roles] = {worker.worker_id: [] for worker in sorted(workers, key=_name)}
    items = [(demand, kind) for demand in demands for kind in demand.kinds]
    for demand, kind in sorted(items, key=lambda item: (costs.room_for([item]), item[0].model, item[1])):
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


def _add(demand: Demand, kind: PlacementType, held: dict[WorkerId, _Roles], costs: ClusterCosts) -> bool:
    """Put a type on the worker that has most room left then; whether there is one."""
    rooms = [
        (costs.room_for([*roles, (demand, kind)]), worker_id)
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
