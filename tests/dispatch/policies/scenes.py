"""Clusters, loads and views for the tests of policies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tests.profiler.synthetic import EDC_BYTES, SHAPES
from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.protocols import Assignment, ClusterView, Dispatcher, PendingRequest, WorkerView
from tridentserve.stages import Stage

TINY, SMALL, LARGE, HUGE = SHAPES


LOAD = (LoadShare("one", TINY, 20, 8.0), LoadShare("one", SMALL, 20, 4.0), LoadShare("one", LARGE, 20, 2.0))


def cluster(*nodes: int, memory_bytes: int = EDC_BYTES) -> list[WorkerSpec]:
    """So many workers in each node."""
    return [
        WorkerSpec(f"n{node}-w{i}", f"n{node}", memory_bytes) for node, size in enumerate(nodes) for i in range(size)
    ]


def views(
    specs: Sequence[WorkerSpec], placement: PlacementPlan, busy_until_s: Mapping[WorkerId, float] | None = None
) -> list[WorkerView]:
    """The workers with what they hold; idle but for those in `busy_until_s`."""
    busy = busy_until_s or {}
    return [
        WorkerView(
            spec.worker_id,
            spec.node_id,
            spec.memory_bytes,
            placement.replicas[spec.worker_id],
            idle=spec.worker_id not in busy,
            free_at_s=busy.get(spec.worker_id, 0.0),
        )
        for spec in specs
    ]


def started(
    dispatcher: Dispatcher, pending: Sequence[PendingRequest], workers: Sequence[WorkerView], now_s: float = 0.0
) -> dict[str, Assignment]:
    """The assignments that the dispatcher starts, by request, in its order."""
    decisions = dispatcher.decide(ClusterView(now_s, pending, (), workers))
    return {name: assignment for assignment in decisions.assignments for name in assignment.request_ids}


def holding(placement: PlacementPlan, stages: Collection[Stage], model: str = "one") -> list[WorkerId]:
    """The workers that hold exactly these stages of a model."""
    held = frozenset(Replica(model, stage) for stage in stages)
    return [worker_id for worker_id, replicas in placement.replicas.items() if replicas == held]
