"""The number of workers that each virtual replica gets, how many of them are primaries or auxiliaries, and where
workers that hold everything serve at least as much.

TridentServe, arXiv 2510.02838, appendix C.1, "Split()" and the alignment step of "PackPerMachine()". Whole workers are
shared in proportion by the largest remainder method, with a minimum for each claimant.

Weights that do not fit beside the others leave, and come back when a plan needs them; seconds, where a large request
takes minutes. The paper gives such requests auxiliaries instead. On many workers these are used as well as primaries;
on a few, whole workers for E or C are more than the load asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from placement.demands import ClusterCosts, ReplicaDemand
from placement.packing import Portion
from placement.units import ALONE, Units, WorkerCounts, count_smallest_workable
from placement.virtual_replicas import Fit
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import PlacementError
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.protocols import StageTimes
from tridentserve.stages import PlacementType, Stage, VirtualReplica

# Rates are measured: a capacity this much short of another counts as equal.
_TOLERANCE = 1e-9
# All stages on every worker may bring this much more work than a split: no request then waits for one of a few workers.
_ABOUT = 1.02


def split(
    replica: VirtualReplica,
    budget: int,
    rates: Mapping[PlacementType, float],
    min_primaries: int = 1,
    units: Units = ALONE,
) -> WorkerCounts:
    """Workers per placement type, `budget` in all, or as many of it as make whole units.

    `rates` are requests per second and worker of the primary and of each auxiliary. Primaries are as many as leave
    every auxiliary able to keep up, n_aux v_aux >= n_pri v_pri: floor(budget / (1 + sum v_pri / v_aux)), one fewer
    while rounding breaks that. What remains goes to the auxiliary with the largest deficit. With a budget too small
    for that, feasibility comes first: `min_primaries`, at least one (or a unit) of each auxiliary.
    Raises `PlacementError` when the budget is below `count_smallest_workable`.
    """
    smallest, unit = count_smallest_workable(replica, min_primaries, units), units.get(replica.primary, 1)
    if budget < smallest:
        raise PlacementError(f"{replica} needs at least {smallest} workers, its share is {budget}; add workers")
    if not replica.auxiliaries:
        return {replica.primary: budget - budget % unit}
    load = 1 + sum(rates[replica.primary] / rates[auxiliary] for auxiliary in replica.auxiliaries)
    most = budget - (smallest - min_primaries)
    primaries = min(max(int(budget / load + _TOLERANCE), min_primaries), most) // unit * unit
    while True:
        counts = {replica.primary: primaries, **_share_out(replica, budget - primaries, rates, units)}
        if primaries <= min_primaries or keeps_up(replica, counts, rates):
            # What makes no whole unit of an auxiliary may make one of primaries.
            counts[replica.primary] += (budget - sum(counts.values())) // unit * unit
            return counts
        primaries -= unit


def keeps_up(
    replica: VirtualReplica, counts: Mapping[PlacementType, int], rates: Mapping[PlacementType, float]
) -> bool:
    """True when every auxiliary type is at least as fast as the primaries together."""
    primary_rate = counts[replica.primary] * rates[replica.primary]
    return all(counts[kind] * rates[kind] >= primary_rate * (1 - _TOLERANCE) for kind in replica.auxiliaries)


def pad_to_degrees(
    replica: VirtualReplica,
    counts: WorkerCounts,
    rates: Mapping[PlacementType, float],
    degrees: Sequence[int],
    units: Units = ALONE,
) -> WorkerCounts:
    """Raise the primaries to a multiple of each degree in turn, by workers borrowed from the auxiliaries, where those
    still keep up; elsewhere leave them, so that a degree is never bought with a congested stage."""
    padded = dict(counts)
    for degree in sorted(degrees):
        missing = -padded[replica.primary] % degree
        auxiliary_total = sum(padded[kind] for kind in replica.auxiliaries) - missing
        if missing == 0 or auxiliary_total < count_smallest_workable(replica, 0, units):
            continue
        attempt = {
            replica.primary: padded[replica.primary] + missing,
            **_share_out(replica, auxiliary_total, rates, units),
        }
        if keeps_up(replica, attempt, rates):
            padded = attempt
    return padded


def _share_out(
    replica: VirtualReplica, budget: int, rates: Mapping[PlacementType, float], units: Units = ALONE
) -> WorkerCounts:
    """One unit for each auxiliary, the others one by one to the type with the least capacity of those that have a unit
    no larger than what is left."""
    counts = {kind: units.get(kind, 1) for kind in replica.auxiliaries}
    left = budget - sum(counts.values())
    while fitting := [kind for kind in replica.auxiliaries if units.get(kind, 1) <= left]:
        slowest = min(fitting, key=lambda kind: (counts[kind] * rates[kind], kind))
        counts[slowest] += units.get(slowest, 1)
        left -= units.get(slowest, 1)
    return counts


def share_in_units(total: int, weights: Sequence[float], minimums: Sequence[int], unit: int) -> list[int]:
    """`share_by_largest_remainder` in multiples of `unit`; the first gets what is left over. Where the minimums do not
    fit in whole units, workers are shared one by one."""
    whole = [-(-minimum // unit) for minimum in minimums]
    if unit == 1 or sum(whole) > total // unit:
        return share_by_largest_remainder(total, weights, minimums)
    first, *others = [unit * share for share in share_by_largest_remainder(total // unit, weights, whole)]
    return [first + total % unit, *others]


def share_by_largest_remainder(total: int, weights: Sequence[float], minimums: Sequence[int]) -> list[int]:
    """Whole shares of `total` in proportion to `weights`, none below its minimum.

    Claimants whose proportional share is below their minimum get the minimum, and the others share what is left by
    largest remainder (ties to the first). The minimums must fit: `sum(minimums) <= total`, else `ValueError`, as with
    weights that are not all above 0.
    """
    if len(weights) != len(minimums) or not weights or min(weights) <= 0 or sum(minimums) > total:
        raise ValueError(f"cannot share {total} by weights {weights} with minimums {minimums}")
    shares = list(minimums)
    free = set(range(len(weights)))
    while True:
        left = total - sum(shares[i] for i in range(len(weights)) if i not in free)
        weight = sum(weights[i] for i in free)
        quotas = {i: left * weights[i] / weight for i in sorted(free)}
        short = {i for i, quota in quotas.items() if quota < minimums[i]}
        if not short:
            break
        free -= short
    for i, quota in quotas.items():
        shares[i] = int(quota)
    by_remainder = sorted(quotas, key=lambda i: (int(quotas[i]) - quotas[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


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
    """True when workers that hold everything serve about as much as these portions of them; None: they are too few for
    portions. Any of them can then take what is urgent, where a short request would wait for a long C on one of a few
    auxiliaries.
    """
    together_s = compute_together_gpu_seconds(demands, times, costs)
    if portions is None or together_s == math.inf:
        return together_s < math.inf
    return together_s <= _ABOUT * compute_split_gpu_seconds(portions, num_workers)


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
    """The GPU-seconds that the load would take if all workers were as busy as the busiest of these portions are."""
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
