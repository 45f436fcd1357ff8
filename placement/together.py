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
from placement.virtual_replicas import Fit
from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.protocols import StageTimes
from tridentserve.stages import Stage

# A type with fewer workers than this may have far more of them than it needs, or far fewer.
_SEVERAL = 4


def place_together(
    demands: Sequence[ReplicaDemand], workers: Sequence[WorkerSpec], costs: ClusterCosts, epoch: int
) -> PlacementPlan:
    """The plan in which every worker holds everything."""
    held = _list_replicas(demands)
    reason = "every worker holds all stages"
    if not _fit_at_once(demands, costs):
        reason += "; weights that do not fit beside the others leave and come back"
    return PlacementPlan({worker.worker_id: held for worker in workers}, reason, epoch)


def serves_as_much(
    demands: Sequence[ReplicaDemand],
    portions: Sequence[Portion] | None,
    times: StageTimes,
    costs: ClusterCosts,
    num_workers: int,
) -> bool:
    """True when workers that hold everything serve at least as much as these portions of them; None: they are too few
    for portions.

    Where weights would leave, portions of which each type has several workers are preferred: they lose little by whole
    numbers, and no group waits while its leader decodes.
    """
    together_s = compute_together_gpu_seconds(demands, times, costs)
    if portions is None or together_s == math.inf:
        return together_s < math.inf
    is_coarse = any(count < _SEVERAL for portion in portions for count in portion.counts.values())
    if not is_coarse and not _fit_at_once(demands, costs):
        return False
    return together_s <= compute_split_gpu_seconds(portions, num_workers)


def compute_together_gpu_seconds(demands: Sequence[ReplicaDemand], times: StageTimes, costs: ClusterCosts) -> float:
    """GPU-seconds of the load where every worker holds everything, with the time in which weights come back; infinity
    where some request does not fit so."""
    spare_bytes = costs.compute_spare_bytes(_list_replicas(demands))
    requests = sum(share.weight for demand in demands for share in demand.load)
    total_s = 0.0
    for demand in demands:
        if costs.find_memory_model(demand.model).fit_apart(demand.model, list(demand.fit.min_degrees)) is None:
            return math.inf
        own = sum(share.weight for share in demand.load) / requests
        for share in demand.load:
            total_s += share.weight * _compute_gpu_seconds(share, times, costs, spare_bytes, 1 - own)
    return total_s


def compute_split_gpu_seconds(portions: Sequence[Portion], num_workers: int) -> float:
    """What the load would bring if all workers were as busy as the busiest of these portions are."""
    busiest = 0.0
    for portion in portions:
        requests = sum(share.weight for share in portion.demand.load)
        for kind, count in portion.counts.items():
            busiest = max(busiest, requests / (count * portion.rates[kind]))
    return busiest * num_workers


def _fit_at_once(demands: Sequence[ReplicaDemand], costs: ClusterCosts) -> bool:
    """True when all weights stay in memory, whatever runs. Each size fits a worker that holds everything."""
    peaks = [costs.compute_peak_bytes(share, _fit(share, costs)) for demand in demands for share in demand.load]
    return costs.compute_spare_bytes(_list_replicas(demands)) >= max(peaks)


def _list_replicas(demands: Sequence[ReplicaDemand]) -> frozenset[Replica]:
    return frozenset(Replica(demand.model, stage) for demand in demands for stage in Stage)


def _fit(share: LoadShare, costs: ClusterCosts) -> Fit:
    fit = costs.find_memory_model(share.model).fit_apart(share.model, [share.shape])
    assert fit is not None  # all shapes of its model were looked at before
    return fit


def _compute_gpu_seconds(
    share: LoadShare, times: StageTimes, costs: ClusterCosts, spare_bytes: int, others: float
) -> float:
    """GPU-seconds of one request. Where its activations need more than `spare_bytes`, weights leave: those of its own
    model that are not needed at the time, and all of them with the probability `others`, which is that the next request
    is of another model."""
    fit, load_s = _fit(share, costs), {stage: times.load_seconds(share.model, stage) for stage in Stage}
    apart = costs.find_memory_model(share.model).find_stages_apart(share.model, share.shape)
    reload_s = 0.0
    if costs.compute_peak_bytes(share, fit) > spare_bytes:
        reload_s += fit.min_degree * others * sum(load_s.values())
    if Stage.DECODE in apart:
        reload_s += load_s[Stage.DIFFUSE]  # of the leader, which decodes
    if Stage.ENCODE in apart:
        reload_s += fit.min_degree * load_s[Stage.ENCODE]
    return costs.compute_gpu_seconds(share, fit, Stage) + reload_s
