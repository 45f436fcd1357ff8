"""Placements that a person would make by hand: all stages everywhere, or a cluster for each stage (appendix D.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dispatch.policies.greedy.work import WorkTimes, make_fresh_request
from dispatch.policies.policy import make_example_request
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError, PlacementError
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.protocols import StageTimes
from tridentserve.stages import Stage


def co_locate(workers: Sequence[WorkerSpec], load: Sequence[LoadShare]) -> PlacementPlan:
    """E, D and C of every model of the load on every worker, whether they fit or not (B1 to B4)."""
    replicas = frozenset(Replica(model, stage) for model in list_models(load) for stage in Stage)
    return PlacementPlan({worker.worker_id: replicas for worker in workers}, reason="all stages on every worker")


def disaggregate(times: StageTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadShare]) -> PlacementPlan:
    """A cluster for each stage, which holds that stage of every model of the load (B5 and B6). D has the first nodes,
    as far as possible whole ones. Raises `PlacementError` for fewer than three workers."""
    models = list_models(load)
    sizes = compute_stage_sizes(sum_gpu_seconds(times, load), len(workers))
    replicas: dict[WorkerId, frozenset[Replica]] = {}
    rest = sorted(workers, key=lambda worker: (worker.node_id, worker.place, worker.worker_id))
    for stage in (Stage.DIFFUSE, Stage.DECODE, Stage.ENCODE):
        mine, rest = rest[: sizes[stage]], rest[sizes[stage] :]
        held = frozenset(Replica(model, stage) for model in models)
        replicas.update({worker.worker_id: held for worker in mine})
    split = ", ".join(f"{sizes[stage]} {stage.letter}" for stage in Stage)
    return PlacementPlan(replicas, reason=f"a cluster for each stage, by measured rates: {split}")


def sum_gpu_seconds(times: StageTimes, load: Sequence[LoadShare]) -> dict[Stage, float]:
    """GPU-seconds of each stage that the load brings at the optimal degrees: demand over rate."""
    work = WorkTimes(times, aligned=False)
    totals = dict.fromkeys(Stage, 0.0)
    for kind in load:
        spec = make_example_request(kind)
        request, degree = make_fresh_request(spec), work.optimal_degree(spec)
        totals[Stage.ENCODE] += kind.weight * work.encode_s(request, degree)
        totals[Stage.DIFFUSE] += kind.weight * degree * work.diffuse_s(request, degree)
        totals[Stage.DECODE] += kind.weight * work.decode_s(request, degree)
    return totals


def compute_stage_sizes(gpu_seconds: Mapping[Stage, float], total: int) -> dict[Stage, int]:
    """N_s in proportion to demand over rate, rounded, 1 at least; then the largest is adjusted so that they sum to
    `total` (D.2)."""
    if total < len(Stage):
        raise PlacementError(f"a cluster for each stage needs 3 workers and there are {total}; use another policy")
    whole = sum(gpu_seconds.values())
    if not whole > 0:
        raise ConfigError("the expected load brings no work; give at least one kind of request a weight above 0")
    sizes = {stage: max(1, round(total * seconds / whole)) for stage, seconds in gpu_seconds.items()}
    while (left := total - sum(sizes.values())) != 0:
        sizes[max(sizes, key=sizes.__getitem__)] += 1 if left > 0 else -1
    return sizes


def list_models(load: Sequence[LoadShare]) -> tuple[str, ...]:
    """The models of a load, sorted. `ConfigError` when there are none: these placements are made for a load."""
    if not load:
        raise ConfigError("this policy places stages by hand and needs the expected load; give at least one kind")
    return tuple(sorted({kind.model for kind in load}))
