"""Adjust-on-Dispatch (TridentServe, arXiv 2510.02838, section 5.1): replicas that a worker's placement has and its
memory does not have yet are loaded by the first plan that needs them."""

from __future__ import annotations

from collections.abc import Iterable

from dispatch.workers.pools import Pool
from tridentserve.plans import Replica, WorkerId
from tridentserve.protocols import StageTimes, WorkerView
from tridentserve.stages import Stage


def compute_load_seconds(pool: Pool, model: str, stages: Iterable[Stage], degree: int, times: StageTimes) -> float:
    """Seconds until some stages are in the memory of `degree` workers of one node, those that lack the least: idle ones
    where a node has as many, else any. Workers load side by side; infinity when no node has as many."""
    load_s = {stage: times.load_seconds(model, stage) for stage in stages}
    units = degree // pool.unit

    def unit_s(unit: Iterable[WorkerView]) -> float:
        return max(sum(load_s[stage] for stage in _list_missing(worker, model, load_s)) for worker in unit)

    def least_s(nodes: Iterable[list[tuple[WorkerView, ...]]]) -> float:
        return min((sorted(map(unit_s, node))[units - 1] for node in nodes if len(node) >= units), default=float("inf"))

    nodes = [pool.list_units(node) for node in pool.nodes]
    idle_s = least_s([unit for unit in node if all(worker.idle for worker in unit)] for node in nodes)
    return idle_s if idle_s < float("inf") else least_s(nodes)


def find_resident(pool: Pool, model: str, stages: Iterable[Stage]) -> frozenset[WorkerId]:
    """The workers that need not load any of these stages."""
    wanted = tuple(stages)
    return frozenset(
        worker.worker_id for node in pool.nodes for worker in node if not _list_missing(worker, model, wanted)
    )


def _list_missing(worker: WorkerView, model: str, stages: Iterable[Stage]) -> list[Stage]:
    if worker.resident is None:
        return []
    return [stage for stage in stages if Replica(model, stage) not in worker.resident]
