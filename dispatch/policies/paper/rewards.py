"""The rewards of TridentServe (arXiv 2510.02838, section 6.2 and appendix C.2).

For a request r, which may be a batch, on k workers of primary type i:

    maximize    sum of  on_time y_r + A_r (x_r - y_r) - b_i l_r x_r,    x_r = sum over i, k of x_rik
    overtime    o_r = max(0, (now + T_r - D_r) / T_r),                  T_r = the least T_rik
    late        A_r = min(on_time, late (1 + o_r))

T_rik is the runtime of the stages that type i holds, D_r the deadline, l_r the tokens, and b_i the penalty of type i
for what it hands on or is handed. y_r is 1 where the chosen group meets the deadline (C3a, C3b). Which groups do is
known before the solve, so y_r is no variable here: a group has the reward that it would give y_r.

The text of the paper that was at hand has lost its formulas. What it says in words: the reward favours requests in time
and ages by the overtime factor up to a starvation threshold, where it is that of a request in time again; the penalty
grows with the index of the virtual replica, is linear in the length, and orders of magnitude smaller. The equations and
constants are those that this project has had since its first version. A request that could be in time, on a group with
which it is not, has the reward of one that is just late: the text leaves that open. So it does which of several groups
with the same reward is chosen; here the one that ends first, by a weight that is smaller than any penalty. And overtime
factors that differ by less than a half count as one, so that requests share variables: at thousands of GPUs most
requests that are late would have variables of their own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dispatch.candidates.candidate import Candidate
from dispatch.candidates.values import OVERDUE, Appraisal, Pressure, Standing, drop_dominated
from dispatch.candidates.work import Work
from dispatch.options import ValueOptions
from dispatch.solver.problem import GroupKind
from tridentserve.stages import PlacementType, Stage


@dataclass(frozen=True, slots=True)
class PaperWeights:
    """The constants of appendix C.2."""

    on_time: float = 1000.0
    """Reward for a request in time, and the most that a late one can age to."""
    late: float = 100.0
    """Reward for a request that is just late; it grows by as much with each of its own runtimes of overtime."""
    condition_per_token: float = 1e-5
    """Penalty where E runs elsewhere, per token."""
    latents_per_token: float = 1e-4
    """Penalty where C runs elsewhere, per token. More than for E, so that types rank V0, V1, V2, V3."""
    tie: float = 1e-3
    """Not the paper's: the weight of an early end among groups with the same reward."""


PAPER_WEIGHTS = PaperWeights()

# An overtime factor from which a late request has the reward of one in time.
_AGED = PAPER_WEIGHTS.on_time / PAPER_WEIGHTS.late - 1
_LEVELS_PER_RUNTIME = 2


class _RewardedGroup(NamedTuple):
    """The parts of the reward of a group that idle workers can form now."""

    group: GroupKind
    efficient: bool
    penalty: float
    """The reward is less by this, for stages that run elsewhere."""
    tie: float
    """The part that decides between groups with the same reward."""


class RewardAppraisal(Appraisal):
    """The rewards of groups to requests with the same work. `Standing.level` is the overtime factor here."""

    def __init__(
        self,
        work: Work,
        candidates: Sequence[Candidate],
        idle: Sequence[int],
        now_s: float,
        pressure: Pressure,
        options: ValueOptions,
        waits: bool,
    ) -> None:
        """`waits`: a request that can be in time has only groups with which it is."""
        super().__init__(candidates, idle, now_s, pressure, options)
        self._waits = waits
        tokens = float(work.shape.tokens * work.num_outputs * work.batch)
        primaries = {candidate.group: candidate.primary for candidate in candidates}
        penalties = {
            primary: compute_communication_penalty(primary, tokens) for primary in dict.fromkeys(primaries.values())
        }
        self._rewarded = [
            _RewardedGroup(
                each.group,
                each.efficient,
                penalties[primaries[each.group]],
                PAPER_WEIGHTS.tie * self.best_run_s / max(self.best_run_s, each.finish_s - now_s),
            )
            for each in self._possible
        ]

    def find_standing(self, deadline_s: float) -> Standing:
        """The number of groups in time, and the overtime factor of the request, rounded; above 0 when it is late."""
        if (overtime := (self.best_finish_s - deadline_s) / self.best_run_s) > 0:
            levels = math.floor(_LEVELS_PER_RUNTIME * min(overtime, _AGED)) + 0.5
            level = min(_AGED, levels / _LEVELS_PER_RUNTIME)
        else:
            level = 0.0
        return Standing(bisect_right(self._finishes_s, deadline_s), level)

    def compute_values_at(self, standing: Standing) -> Mapping[GroupKind, float]:
        """The objective's coefficients; groups that it could only lose by are left out. `OVERDUE`: the reward of a
        request in time for each efficient group."""
        if (known := self._values.get(standing)) is None:
            late_reward = compute_late_reward(math.inf if standing == OVERDUE else standing.level)
            narrowest = self._find_narrowest(standing)
            found: dict[GroupKind, float] = {}
            for index, (group, efficient, penalty, tie) in enumerate(self._rewarded):
                if index < standing.in_time:
                    reward = PAPER_WEIGHTS.on_time - penalty
                elif efficient and group.degree >= narrowest:
                    reward = late_reward - penalty
                else:
                    continue
                if reward > 0:
                    found[group] = reward + tie
            known = self._values[standing] = drop_dominated(found)
        return known

    def _find_narrowest(self, standing: Standing) -> float:
        """The narrowest degree of groups that may be used although they miss the deadline; infinity: none may."""
        if standing == OVERDUE:
            return 1
        if self._waits and not standing.level:
            return math.inf
        return self._optimal if standing.level > 0 and self._options.hopeless_at_optimal else 1


def compute_late_reward(overtime: float) -> float:
    """The reward of a request that will be late, by its overtime factor (equations 1 and 2)."""
    return min(PAPER_WEIGHTS.on_time, PAPER_WEIGHTS.late * (1 + overtime))


def compute_communication_penalty(primary: PlacementType, tokens: float) -> float:
    """Proportional to tokens, per stage that runs elsewhere (equation 3): V0 0, V1 least, V3 most."""
    condition = 0.0 if Stage.ENCODE in primary.stages else PAPER_WEIGHTS.condition_per_token
    latents = 0.0 if Stage.DECODE in primary.stages else PAPER_WEIGHTS.latents_per_token
    return (condition + latents) * tokens
