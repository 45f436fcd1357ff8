"""The number of workers that each virtual replica gets, and how many of them are primaries or auxiliaries.

TridentServe, arXiv 2510.02838, appendix C.1, "Split()" and the alignment step of "PackPerMachine()". Whole workers are
shared in proportion by the largest remainder method, with a minimum for each claimant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tridentserve.errors import PlacementError
from tridentserve.stages import PlacementType, VirtualReplica

# Rates are measured: a capacity this much short of another counts as equal.
_TOLERANCE = 1e-9

WorkerCounts = dict[PlacementType, int]
# The number of workers of a type that hold a stage's weights together (appendix E.2); 1 for types that are not in it.
Units = Mapping[PlacementType, int]
_ALONE: Units = MappingProxyType({})


def count_smallest_workable(replica: VirtualReplica, min_primaries: int = 1, units: Units = _ALONE) -> int:
    """The fewest workers that cover E, D and C: enough primaries for the narrowest degree, a unit of each auxiliary."""
    return min_primaries + sum(units.get(kind, 1) for kind in replica.auxiliaries)


def split(
    replica: VirtualReplica,
    budget: int,
    rates: Mapping[PlacementType, float],
    min_primaries: int = 1,
    units: Units = _ALONE,
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
    units: Units = _ALONE,
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
    replica: VirtualReplica, budget: int, rates: Mapping[PlacementType, float], units: Units = _ALONE
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
