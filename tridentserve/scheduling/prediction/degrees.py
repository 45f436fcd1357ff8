"""The degrees that the default policy would let a request use (`dispatch.candidates.values.Appraisal`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tridentserve.scheduling.prediction.costs import RequestCosts

# The default policy asks for the whole efficiency at this load, and for less in proportion at a lower one.
_FULL_LOAD = 0.9
# Rounding of worker-seconds that are the same.
_ROUNDING = 1e-9


def find_asked_efficiency(load: float, min_efficiency: float) -> float:
    """The efficiency that the policy asks of a degree for a request with time to spare."""
    return min(min_efficiency, load / _FULL_LOAD)


class PossibleWay(NamedTuple):
    """A degree at which what is left of a request could run."""

    degree: int
    seconds: float
    """Seconds until its end."""
    gpu_seconds: float


@dataclass(frozen=True, slots=True)
class PossibleWays:
    """The ways in which what is left of a request could run on workers that are idle."""

    allowed: Sequence[PossibleWay]
    """Those that the policy would choose among, narrow ones first."""
    least_gpu_seconds: float
    best_s: float
    """Seconds until its end at the fastest of all degrees."""
    is_hopeless: bool
    """Its deadline cannot be met any more."""


def list_ways(costs: RequestCosts, steps: float, encodes: bool, widest: float = math.inf) -> list[PossibleWay]:
    """All degrees up to `widest`, narrow ones first."""
    return [
        PossibleWay(k, costs.take_s(k, steps, encodes), costs.gpu_seconds(k, steps, encodes))
        for k in costs.step_s
        if k <= widest
    ]


def appraise_ways(
    ways: Sequence[PossibleWay], optimal: int, left_s: float, spare: float, asked: float, widest_idle: float = math.inf
) -> PossibleWays:
    """The choice of the policy among `ways`, of which there must be one, `left_s` before the deadline, where groups
    of up to `widest_idle` idle workers can be formed: those that meet it, and of these the ones that leave a share of
    the time to `spare` and are as efficient as `asked`, where there are any; for a hopeless request the `optimal`
    degree."""
    least, best_s = min(way.gpu_seconds for way in ways), min(way.seconds for way in ways)
    if best_s > left_s:
        at_optimal = [way for way in ways if way.degree == optimal] or list(ways[:1])
        return PossibleWays(at_optimal, least, best_s, is_hopeless=True)
    in_time = [way for way in ways if way.seconds <= left_s and way.degree <= widest_idle]
    most, latest_s = least * (1 + _ROUNDING), (1 - spare) * left_s
    frugal = [way for way in in_time if asked * way.gpu_seconds <= most and way.seconds <= latest_s]
    return PossibleWays(frugal or in_time, least, best_s, is_hopeless=False)


def expect_first_way(
    ways: Sequence[PossibleWay], optimal: int, left_s: float, spare: float, asked: float, widest_idle: int
) -> PossibleWay:
    """The way in which a request that nobody competes with would begin: of the allowed ones the one that does most of
    it per second. Where no idle group is allowed it waits, and begins at the narrowest degree that is in time."""
    allowed = appraise_ways(ways, optimal, left_s, spare, asked, widest_idle).allowed
    if not allowed:
        return next(way for way in ways if way.seconds <= left_s)
    return max(allowed, key=lambda way: (way.degree / max(_ROUNDING, way.gpu_seconds), -way.degree))
