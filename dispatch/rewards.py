"""What each candidate is worth for a deadline: on-time reward, aging, communication, GPU-seconds, latency.

TridentServe, arXiv 2510.02838, section 6.2 (C0, objective) and appendix C.2 (weights).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dispatch.candidates import Candidate
from dispatch.options import RewardOptions
from dispatch.problem import Slot
from tridentserve.stages import PlacementType, Stage

# Late rewards are rounded down to a quarter of the basic one, so that requests of like lateness share a variable.
_LATE_STEPS = 4
# Prices stay a tenth of the smallest reward even where a queue is very long.
_MAX_PRICE = 5.0


@dataclass(frozen=True, slots=True)
class _Offer:
    """A slot that idle workers can form now, with what it costs (communication, GPU-seconds, latency)."""

    slot: Slot
    efficient: bool
    finish_s: float
    cost: float


class Appraisal:
    """What slots are worth to requests with the same work, as a function of their deadline."""

    def __init__(
        self, candidates: Sequence[Candidate], idle: Sequence[int], tokens: float, now_s: float, options: RewardOptions
    ) -> None:
        """`idle[pool]` is the largest number of idle workers in a node of the pool: the widest slot it can form."""
        self._options = options
        self._best_finish_s = min((c.finish_s(c.earliest_start_s) for c in candidates), default=math.inf)
        self._best_run_s = min((c.run_s for c in candidates), default=math.inf)
        self._offers: list[_Offer] = []
        for candidate in candidates:
            if candidate.slot.degree <= idle[candidate.slot.pool]:
                narrowest = min(candidates, key=lambda other: (other.slot.degree, other.run_s))
                cost = communication_penalty(candidate.primary, tokens, options)
                cost += price(candidate, narrowest, now_s, options)
                offer = _Offer(candidate.slot, candidate.efficient, candidate.finish_s(now_s), cost)
                self._offers.append(offer)

    def is_fully_aged(self, deadline_s: float) -> bool:
        """Whether the deadline is so far out of reach that the late reward grows no more. Never without candidates."""
        overtime_s = self._best_finish_s - deadline_s
        if not 0 < overtime_s < math.inf:
            return False
        return late_reward(overtime_s, self._best_run_s, self._options) >= self._options.on_time

    def values(self, deadline_s: float) -> dict[Slot, float]:
        """The value of each slot that may be used now.

        While some candidate can still make the deadline, now or once busy workers are expected to be free, only slots
        that make it count: to start late what can be had in time is never better than to wait for it. Of those the
        efficient ones, or where none of them is in time, the wider ones. Once the deadline is out of reach, all
        efficient slots count, and the reward grows with the overtime (what comes after that: `dispatch.overdue`).
        """
        options = self._options
        if not self._offers:
            return {}
        if self._best_finish_s <= deadline_s:
            reward = options.on_time
            in_time = [offer for offer in self._offers if offer.finish_s <= deadline_s]
            chosen = [offer for offer in in_time if offer.efficient] or in_time
        else:
            reward = late_reward(self._best_finish_s - deadline_s, self._best_run_s, options)
            chosen = [offer for offer in self._offers if offer.efficient]
        # Whatever the weights, to run is worth more than not to.
        return {offer.slot: max(reward - offer.cost, options.late / 1000) for offer in chosen}


def late_reward(overtime_s: float, best_run_s: float, options: RewardOptions) -> float:
    """min(on_time, late (1 + overtime / T_best)), in steps (appendix C.2, equations 1 and 2). T_best is the request's
    shortest runtime; overtime counts from the deadline to the best finish that can still be had."""
    aged = options.late * (1 + overtime_s / best_run_s)
    step = options.late / _LATE_STEPS
    return min(options.on_time, step * math.floor(aged / step))


def communication_penalty(primary: PlacementType, tokens: float, options: RewardOptions) -> float:
    """Proportional to tokens, per stage that runs elsewhere (appendix C.2, equation 3): V0 0, V1 least, V3 most."""
    condition = 0.0 if Stage.ENCODE in primary.stages else options.condition_per_token
    latents = 0.0 if Stage.DECODE in primary.stages else options.latents_per_token
    return (condition + latents) * tokens


def price(candidate: Candidate, narrowest: Candidate, now_s: float, options: RewardOptions) -> float:
    """GPU-seconds and latency, in units of the same request alone at its narrowest degree."""
    gpu_seconds = candidate.gpu_seconds(now_s) / (narrowest.slot.degree * narrowest.run_s)
    latency = (candidate.finish_s(now_s) - now_s) / narrowest.run_s
    return options.gpu_seconds * min(gpu_seconds, _MAX_PRICE) + options.latency * min(latency, _MAX_PRICE)
