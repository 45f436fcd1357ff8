"""The value of each candidate for a deadline: on-time reward, aging, communication, GPU-seconds, latency.

TridentServe, arXiv 2510.02838, section 6.2 (C0, objective) and appendix C.2 (weights). All weights of the objective
are here and in `RewardOptions`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dispatch.candidates.survey import Candidate
from dispatch.options import RewardOptions
from dispatch.solver.problem import GroupKind
from tridentserve.stages import PlacementType, Stage

# Late rewards are rounded down to a quarter of the basic one, so that requests of like lateness share a variable.
_LATE_STEPS = 4
# No work takes less: what is left of a stopped request may be nothing but a decode that costs nothing.
_LEAST_S = 1e-6
# Prices stay a tenth of the smallest reward even where a queue is very long.
_MAX_PRICE = 5.0
_LEAST_PRICED_S = 1e-3


class _PricedCandidate(NamedTuple):
    """A group that idle workers can form now, with what it costs (communication, GPU-seconds, latency)."""

    finish_s: float
    group: GroupKind
    efficient: bool
    too_narrow: bool
    cost: float


class Standing(NamedTuple):
    """All that matters of a deadline: how many candidates make it (while one can, now or later), or how far the reward
    has aged once it is out of reach, in steps. Requests with equal work and standing are worth the same."""

    in_time: int
    late_steps: int


class Appraisal:
    """The value of groups to requests with the same work, as a function of their deadline."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        idle: Sequence[int],
        tokens: float,
        now_s: float,
        options: RewardOptions,
        narrowing: int,
    ) -> None:
        """`idle[pool]` is the largest number of idle workers in a node of the pool: the widest group it can form.
        `narrowing`: by what the optimal degree may be divided; where C runs on other workers than D, half of it."""
        self._options = options
        self.best_finish_s = min((c.finish_s(c.earliest_start_s) for c in candidates), default=math.inf)
        self._best_run_s = max(_LEAST_S, min((c.run_s for c in candidates), default=math.inf))
        self._priced: list[_PricedCandidate] = []
        narrowest = min(candidates, key=lambda other: (other.group.degree, other.run_s), default=None)
        optimal = max((candidate.group.degree for candidate in candidates if candidate.efficient), default=1)
        for candidate in candidates:
            degree = candidate.group.degree
            if narrowest is not None and degree <= idle[candidate.group.pool]:
                cost = compute_communication_penalty(candidate.primary, tokens, options)
                cost += price(candidate, narrowest, now_s, options) + compute_size_price(narrowest, options)
                too_narrow = degree * _choose_narrowing(candidate, narrowing) < optimal
                priced = _PricedCandidate(
                    candidate.finish_s(now_s), candidate.group, candidate.efficient, too_narrow, cost
                )
                self._priced.append(priced)
        self._priced.sort()
        self._finishes_s = [priced.finish_s for priced in self._priced]
        self._values: dict[Standing, Mapping[GroupKind, float]] = {}

    @property
    def can_run_now(self) -> bool:
        """True when idle workers form some group for this work."""
        return bool(self._priced)

    def is_fully_aged(self, deadline_s: float) -> bool:
        """True when the deadline is so far out of reach that the late reward grows no more. Never without
        candidates."""
        overtime_s = self.best_finish_s - deadline_s
        if not 0 < overtime_s < math.inf:
            return False
        return compute_late_reward(overtime_s, self._best_run_s, self._options) >= self._options.on_time

    def find_standing(self, deadline_s: float) -> Standing:
        """The standing of a deadline now: the number of candidates that meet it, or the late steps."""
        if self.best_finish_s <= deadline_s:
            return Standing(bisect_right(self._finishes_s, deadline_s), 0)
        return Standing(0, _count_late_steps(self.best_finish_s - deadline_s, self._best_run_s, self._options))

    def compute_values(self, deadline_s: float) -> Mapping[GroupKind, float]:
        """The value of each group that may be used now.

        While some candidate can still make the deadline, now or once busy workers are expected to be free, only groups
        that make it count: to start late what can be had in time is never better than to wait for it. Of those,
        the efficient ones count that are not far narrower than the optimal degree, or where none of them is in time,
        the wider ones. Once the deadline is out of reach, the same efficient groups count, and the reward grows with
        the overtime; when it grows no more, narrow ones count too (`dispatch.candidates.classes` says what comes then).
        Groups that are worth no more than a narrower one of their pool are left out.
        """
        return self.compute_values_at(self.find_standing(deadline_s)) if self._priced else {}

    def compute_values_at(self, standing: Standing) -> Mapping[GroupKind, float]:
        """`compute_values` of all deadlines that stand there; made once."""
        if standing not in self._values:
            options = self._options
            if standing.late_steps:
                reward = _compute_late_reward(standing.late_steps, options)
                is_aged = reward >= options.on_time
                chosen = [priced for priced in self._priced if priced.efficient and (is_aged or not priced.too_narrow)]
            else:
                reward = options.on_time
                in_time = [priced for priced in self._priced[: standing.in_time] if not priced.too_narrow]
                chosen = [priced for priced in in_time if priced.efficient] or in_time
            # Whatever the weights, to run is worth more than not to.
            values = {priced.group: max(reward - priced.cost, options.late / 1000) for priced in chosen}
            self._values[standing] = _drop_dominated(values)
        return self._values[standing]


def _choose_narrowing(candidate: Candidate, narrowing: int) -> int:
    """A leader that decodes keeps its workers from being the next wide group, so that those are rare. Where C runs
    elsewhere all workers of a run are free at once, and the next wide group is worth waiting for."""
    return narrowing if candidate.decodes_there else max(1, narrowing // 2)


def _drop_dominated(values: Mapping[GroupKind, float]) -> Mapping[GroupKind, float]:
    """Drop each group that is worth no more than a narrower one of its pool, which fits wherever it does."""
    kept: dict[GroupKind, float] = {}
    best: dict[int, float] = {}
    for group in sorted(values):
        if values[group] > best.get(group.pool, 0.0):
            kept[group] = best[group.pool] = values[group]
    return kept


def compute_late_reward(overtime_s: float, best_run_s: float, options: RewardOptions) -> float:
    """min(on_time, late (1 + overtime / T_best)), in steps (appendix C.2, equations 1 and 2). T_best is the request's
    shortest runtime; overtime counts from the deadline to the best finish that can still be had."""
    return _compute_late_reward(_count_late_steps(overtime_s, best_run_s, options), options)


def _count_late_steps(overtime_s: float, best_run_s: float, options: RewardOptions) -> int:
    """Count the late steps: at least those of a request that is only just late, at most those for an on-time reward."""
    most = math.ceil(options.on_time / options.late * _LATE_STEPS)
    return math.floor(min(_LATE_STEPS * (1 + overtime_s / best_run_s), most))


def _compute_late_reward(steps: int, options: RewardOptions) -> float:
    return min(options.on_time, options.late / _LATE_STEPS * steps)


def compute_communication_penalty(primary: PlacementType, tokens: float, options: RewardOptions) -> float:
    """Proportional to tokens, per stage that runs elsewhere (appendix C.2, equation 3): V0 0, V1 least, V3 most."""
    condition = 0.0 if Stage.ENCODE in primary.stages else options.condition_per_token
    latents = 0.0 if Stage.DECODE in primary.stages else options.latents_per_token
    return (condition + latents) * tokens


def price(candidate: Candidate, narrowest: Candidate, now_s: float, options: RewardOptions) -> float:
    """GPU-seconds and latency, in units of the same request alone at its narrowest degree."""
    run_s = max(narrowest.run_s, _LEAST_S)
    gpu_seconds = candidate.gpu_seconds(now_s) / (narrowest.group.degree * run_s)
    latency = (candidate.finish_s(now_s) - now_s) / run_s
    return options.gpu_seconds * min(gpu_seconds, _MAX_PRICE) + options.latency * min(latency, _MAX_PRICE)


def compute_size_price(narrowest: Candidate, options: RewardOptions) -> float:
    """A price by the logarithm of the GPU-seconds, from 1 ms up, so that it orders requests of all models alike."""
    gpu_seconds = narrowest.group.degree * narrowest.run_s
    return options.size * math.log2(max(gpu_seconds, _LEAST_PRICED_S) / _LEAST_PRICED_S)
