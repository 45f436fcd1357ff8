"""A placement that a person wrote down: types per worker from a configuration, checked for coverage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tridentserve.cluster import WorkerSpec
from tridentserve.errors import PlacementError
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.stages import PlacementType, VirtualReplica


def build_fixed_placement(
    types: Sequence[str | Mapping[str, str]], workers: Sequence[WorkerSpec], models: Sequence[str], epoch: int = 0
) -> PlacementPlan:
    """The plan that gives worker i the i-th entry of `types`.

    An entry is a type name (`EDC`, `DC`, `ED`, `D`, `E`, `C`), which then holds for every model in `models`, or a
    mapping of model to type name. Raises `PlacementError` when the counts differ, a type or a model is unknown, an
    entry is empty, a model is not covered, or a primary could never run because a stage it lacks is on no auxiliary.
    An empty entry would leave a device idle, as nothing is placed there later: it is taken for a mistake.

    The message is about the first of several mistakes in this order: entries by worker, then models as in `models`, and
    within a model workers again.
    """
    if len(types) != len(workers) or not workers:
        raise PlacementError(f"the placement lists {len(types)} workers and there are {len(workers)}; list each once")
    if not models:
        raise PlacementError("the placement has no models; name at least one")
    entries = zip(workers, types, strict=True)
    held = {worker.worker_id: _read_entry(worker.worker_id, entry, models) for worker, entry in entries}
    for model in models:
        _check_covered(model, {worker_id: kinds[model] for worker_id, kinds in held.items() if model in kinds})
    replicas = {
        worker_id: frozenset(Replica(model, stage) for model, kind in kinds.items() for stage in kind.stages)
        for worker_id, kinds in held.items()
    }
    return PlacementPlan(replicas, reason="as configured", epoch=epoch)


def _read_entry(worker_id: str, entry: str | Mapping[str, str], models: Sequence[str]) -> dict[str, PlacementType]:
    names = dict.fromkeys(models, entry) if isinstance(entry, str) else dict(entry)
    if not names:
        raise PlacementError(f"worker {worker_id} holds nothing; give it a type, or take it out of the cluster")
    held: dict[str, PlacementType] = {}
    for model, name in names.items():
        if model not in models:
            raise PlacementError(f"worker {worker_id}: model {model!r} is not served; served are {', '.join(models)}")
        if name not in tuple(PlacementType):
            known = ", ".join(PlacementType)
            raise PlacementError(f"worker {worker_id}: {name!r} is no placement type; use one of {known}")
        held[model] = PlacementType(name)
    return held


def _check_covered(model: str, kinds: Mapping[str, PlacementType]) -> None:
    present = set(kinds.values())
    needed = {replica.primary: replica.auxiliaries for replica in VirtualReplica}
    if not present & needed.keys():
        raise PlacementError(f"no worker holds the diffuse stage of {model}; place EDC, DC, ED or D somewhere")
    for worker_id, held in kinds.items():
        missing = [kind for kind in needed.get(held, ()) if kind not in present]
        if missing:
            raise PlacementError(
                f"worker {worker_id} holds {held} of {model} and can never run a request: no worker holds "
                f"{' or '.join(missing)} alone; place that too"
            )
