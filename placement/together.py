"""All stages of all models on every worker: nothing waits for a worker of the right kind, and none is left over.

Weights that do not fit beside the others leave, and come back when a plan needs them; seconds, where a large request
takes minutes. The paper (TridentServe, arXiv 2510.02838, section 6.1) gives such requests auxiliaries instead. On many
workers these are used as well as primaries; on a few, whole workers for E or C are more than the load asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from placement.demands import ClusterCosts, ReplicaDemand
from placement.packing import Portion
from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.protocols import StageTimes
from tridentserve.stages import Stage


def place_together(
    demands: Sequence[ReplicaDemand], workers: Sequence[WorkerSpec], costs: ClusterCosts, epoch: int
) -> PlacementPlan:
    """The plan in which every worker holds everything."""
    held = _list_replicas(demands)
    reason = "every worker holds all stages"
    if costs.compute_spare_bytes(held) < 0:
        reason += "; weights that do not fit beside the others leave and come back"
    return PlacementPlan({worker.worker_id: held for worker in workers}, reason, epoch)


def compute_together_gpu_seconds(demands: Sequence[ReplicaDemand], times: StageTimes, costs: ClusterCosts) -> float:
    """GPU-seconds of the load where every worker holds everything, with the time in which weights come back; infinity
    where some request does not fit so."""
    all_fit = costs.compute_spare_bytes(_list_replicas(demands)) >= 0
    requests = sum(share.weight for demand in demands for share in demand.load)
    total_s = 0.0
    for demand in demands:
        if costs.find_memory_model(demand.model).fit_apart(demand.model, list(demand.fit.min_degrees)) is None:
            return math.inf
        own = sum(share.weight for share in demand.load) / requests
        for share in demand.load:
            total_s += share.weight * _compute_gpu_seconds(share, times, costs, 0.0 if all_fit else 1 - own)
    return total_s


def compute_split_gpu_seconds(portions: Sequence[Portion], num_workers: int) -> float:
    """What the load would bring if all workers were as busy as the busiest of these portions are."""
    busiest = 0.0
    for portion in portions:
        requests = sum(share.weight for share in portion.demand.load)
        for kind, count in portion.counts.items():
            busiest = max(busiest, requests / (count * portion.rates[kind]))
    return busiest * num_workers


def _list_replicas(demands: Sequence[ReplicaDemand]) -> frozenset[Replica]:
    return frozenset(Replica(demand.model, stage) for demand in demands for stage in Stage)


def _compute_gpu_seconds(share: LoadShare, times: StageTimes, costs: ClusterCosts, others: float) -> float:
    """GPU-seconds of one request. `others`: the probability that the request before was of another model, whose
    weights have driven out all of this one's."""
    memory = costs.find_memory_model(share.model)
    fit = memory.fit_apart(share.model, [share.shape])
    if fit is None:
        return math.inf
    load_s = {stage: times.load_seconds(share.model, stage) for stage in Stage}
    apart = memory.find_stages_apart(share.model, share.shape)
    reload_s = fit.min_degree * others * sum(load_s.values())
    if Stage.DECODE in apart:
        reload_s += load_s[Stage.DIFFUSE]  # of the leader, which decodes
    if Stage.ENCODE in apart:
        reload_s += fit.min_degree * load_s[Stage.ENCODE]
    return costs.compute_gpu_seconds(share, fit, Stage) + reload_s
