"""EDF: earliest deadline first, each at the smallest degree that meets its deadline, on the default's placement.

Not a baseline of the paper: the simplest policy that knows deadlines and degrees.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.policies.greedy.bucket_view import GreedyCandidate
from dispatch.policies.greedy.dispatcher import GreedyDispatcher
from dispatch.policies.greedy.orders import edf
from dispatch.policies.greedy.stage_level import StageLevel
from dispatch.policies.policy import Policy, PolicyContext, register_policy


@register_policy("edf", supports_units=True, runs_whole=True)
def make_edf(context: PolicyContext) -> Policy:
    return Policy(
        GreedyDispatcher(context.times, context.options, edf, StageLevel, by_deadline=prefer_smallest_sufficient)
    )


def prefer_smallest_sufficient(candidates: Sequence[GreedyCandidate], deadline_s: float) -> list[GreedyCandidate]:
    """The narrowest degree in time first; where none is, the earliest finish first, so that a degree is only ever
    widened for an earlier finish. While some degree is in time, those that are not are not tried."""
    in_time = [candidate for candidate in candidates if candidate.finish_s <= deadline_s]
    if in_time:
        return sorted(in_time, key=lambda candidate: (candidate.degree, candidate.finish_s, candidate.pool))
    return sorted(candidates, key=lambda candidate: (candidate.finish_s, candidate.degree, candidate.pool))
