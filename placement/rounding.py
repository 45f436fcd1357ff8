"""Sharing whole workers in proportion: the largest remainder method, with a minimum for each claimant."""

from __future__ import annotations

from collections.abc import Sequence


def shares_in_units(total: int, weights: Sequence[float], minimums: Sequence[int], unit: int) -> list[int]:
    """`largest_remainder` in multiples of `unit`, what is left over going to the first; in single ones where so many do
    not fit."""
    whole = [-(-minimum // unit) for minimum in minimums]
    if unit == 1 or sum(whole) > total // unit:
        return largest_remainder(total, weights, minimums)
    first, *others = [unit * share for share in largest_remainder(total // unit, weights, whole)]
    return [first + total % unit, *others]


def largest_remainder(total: int, weights: Sequence[float], minimums: Sequence[int]) -> list[int]:
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
