"""The value of each group of workers to a request: what it does for it per second, and how urgent that is.

A tick's program chooses the groups with the largest sum of values. docs/policy.md has the reason for each factor.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dispatch.candidates.candidate import Candidate
from dispatch.options import ValueOptions
from dispatch.solver.problem import GroupKind

# Times to deadlines are rounded to this part of the horizon, so that requests of like urgency share a variable;
# those of more horizons than this are not told apart.
_LEVELS_PER_HORIZON = 8
_MOST_HORIZONS = 4.5
# At this load a request that has time to spare uses efficient degrees alone; a lower load asks for less in proportion.
_FULL_LOAD = 0.9
# Rounding of GPU-seconds that are the same.
_ROUNDING = 1e-9
# No work takes less: what is left of a stopped request may be nothing but a decode that costs nothing.
_LEAST_S = 1e-6


@dataclass(slots=True)
class Pressure:
    """The state of the whole service, as far as it matters to the value of a group. It is known once the requests that
    wait have been looked at, and appraised."""

    horizon_s: float
    """The time in which urgency falls by a factor of e."""
    efficiency: float
    """The efficiency that is asked of a group for a request with time to spare: the GPU-seconds of the cheapest group
    over those of this one."""
    is_calm: bool = False
    """True while nothing is lost (`dispatch.candidates.calm`): the earliest deadline goes first, however much it takes.
    """


def find_efficiency(load: float, min_efficiency: float) -> float:
    """The efficiency that is asked for at a load of 0 (no worker is needed) to 1 (all are) or above."""
    return min(min_efficiency, load / _FULL_LOAD)


class Standing(NamedTuple):
    """All that matters of a deadline: how many candidates make it, and its distance in levels. Requests with equal work
    and standing are worth the same."""

    in_time: int
    level: float


HOPELESS = Standing(0, -1)
"""No candidate makes the deadline any more, now or later."""
OVERDUE = Standing(0, -2)
"""So long past the deadline that the request goes before all others, where its turn has come
(`dispatch.candidates.classes`)."""


class _PossibleGroup(NamedTuple):
    """A group that idle workers can form now."""

    finish_s: float
    group: GroupKind
    efficient: bool
    per_s: float
    """The share of all that is left of the request that the group does per second."""
    gpu_seconds: float
    """The GPU-seconds that it takes for that."""


class Appraisal:
    """The value of groups to requests with the same work, as a function of their deadline."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        idle: Sequence[int],
        now_s: float,
        pressure: Pressure,
        options: ValueOptions,
    ) -> None:
        """`idle[pool]` is the largest number of idle workers in a node of the pool: the widest group it can form."""
        self._options = options
        self._now_s = now_s
        self._pressure = pressure
        best_finish_s = best_run_s = least_gpu_seconds = math.inf
        self._optimal, self._possible = 1, []
        for candidate in candidates:
            group, efficient = candidate.group, candidate.efficient
            end_s = candidate.diffuse_end_s(now_s)
            finish_s, gpu_seconds = candidate.finish_after_s(end_s), candidate.compute_gpu_seconds(now_s, end_s)
            start_s = candidate.earliest_start_s
            best_finish_s = min(best_finish_s, finish_s if start_s == now_s else candidate.finish_s(start_s))
            best_run_s = min(best_run_s, candidate.run_s)
            least_gpu_seconds = min(least_gpu_seconds, gpu_seconds)
            if efficient and group.degree > self._optimal:
                self._optimal = group.degree
            if group.degree <= idle[group.pool]:
                per_s = group.degree / max(_LEAST_S, gpu_seconds)
                self._possible.append(_PossibleGroup(finish_s, group, efficient, per_s, gpu_seconds))
        self._possible.sort()
        self.best_finish_s = best_finish_s
        self.best_run_s = max(_LEAST_S, best_run_s)
        self._least_gpu_seconds = least_gpu_seconds if candidates else 0.0
        self._finishes_s = [possible.finish_s for possible in self._possible]
        self._values: dict[Standing, Mapping[GroupKind, float]] = {}

    @property
    def can_run_now(self) -> bool:
        """True when idle workers form some group for this work."""
        return bool(self._possible)

    def is_long_overdue(self, deadline_s: float) -> bool:
        """True when a request can only end `ValueOptions.overdue_runs` of its own runtimes after its deadline, or
        later. Never without candidates."""
        overtime_s = self.best_finish_s - deadline_s
        return 0 < overtime_s < math.inf and overtime_s >= self._options.overdue_runs * self.best_run_s

    def find_standing(self, deadline_s: float) -> Standing:
        """The standing of a deadline now: the number of candidates that meet it, and its distance."""
        if self.best_finish_s > deadline_s:
            return HOPELESS
        horizons = min((deadline_s - self._now_s) / self._pressure.horizon_s, _MOST_HORIZONS)
        return Standing(bisect_right(self._finishes_s, deadline_s), math.floor(_LEVELS_PER_HORIZON * horizons))

    def compute_values_at(self, standing: Standing) -> Mapping[GroupKind, float]:
        """The value of each group that may be used now, for all deadlines that stand there; made once.

        While some candidate can still make the deadline, now or once busy workers are expected to be free, only groups
        that make it count: to start late what can be had in time is never better than to wait for it. Where some of
        them leave time to spare and are as efficient as is asked for, only these; else they may have any degree.
        Hopeless requests run at their optimal degree alone, where a step, which nothing can stop, is over soon, and
        long overdue ones (`OVERDUE`) at each efficient degree. Groups that are worth no more than a narrower one of
        their pool are left out.
        """
        if standing not in self._values:
            if standing in (HOPELESS, OVERDUE):
                urgency = self._options.hopeless / (1 + math.log1p(self._least_gpu_seconds))
                narrowest = self._optimal if standing == HOPELESS and self._options.hopeless_at_optimal else 1
                values = {
                    each.group: urgency * each.per_s
                    for each in self._possible
                    if each.efficient and each.group.degree >= narrowest
                }
            else:
                left_s = (standing.level + 0.5) / _LEVELS_PER_HORIZON * self._pressure.horizon_s
                urgency, in_time = self._measure_urgency(left_s), self._possible[: standing.in_time]
                values = {each.group: urgency * each.per_s for each in self._list_frugal(in_time, left_s) or in_time}
            self._values[standing] = drop_dominated(values)
        return self._values[standing]

    def _measure_urgency(self, left_s: float) -> float:
        """The weight of a share of the request, by the time to its deadline. While nothing is lost all that is left
        of it is one share, so that only the deadline decides between two requests, and not how much they take."""
        if self._pressure.is_calm:
            return self._least_gpu_seconds * math.exp(-left_s / self._pressure.horizon_s)
        slack_s = max(0.0, left_s - (self.best_finish_s - self._now_s))
        return math.exp(-slack_s / self._pressure.horizon_s)

    def _list_frugal(self, in_time: Sequence[_PossibleGroup], left_s: float) -> list[_PossibleGroup]:
        """The groups that are efficient enough and leave a share of the time to the deadline to spare."""
        latest_s = self._now_s + (1 - self._options.spare) * left_s
        most = (1 + _ROUNDING) * self._least_gpu_seconds
        asked = self._pressure.efficiency
        return [each for each in in_time if asked * each.gpu_seconds <= most and each.finish_s <= latest_s]


def drop_dominated(values: Mapping[GroupKind, float]) -> Mapping[GroupKind, float]:
    """Drop each group that is worth no more than a narrower one of its pool, which fits wherever it does."""
    kept: dict[GroupKind, float] = {}
    best: dict[int, float] = {}
    for group, value in sorted(values.items()):
        if value > best.get(group.pool, 0.0):
            kept[group] = best[group.pool] = value
    return kept
