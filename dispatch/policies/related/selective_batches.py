"""TetriServe's selective continuous batching (arXiv 2510.01565, section 5): identical small requests share the steps of
a round where none of them misses its deadline because of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dispatch.policies.greedy.work import count_steps_left
from dispatch.policies.step_level.dispatcher import BatchCandidate, StepTick
from tridentserve.protocols import PendingRequest


def choose_company(
    tick: StepTick, pool: int, first: PendingRequest, others: Iterable[PendingRequest]
) -> list[PendingRequest]:
    """Those of the others that share the steps of `first` on one worker of a pool, in their order. Small requests are
    those that no wider degree serves efficiently, and whose batches have more steps per second."""
    alone = tick.find_batch_candidates([first], pool)
    limit = tick.find_batch_limit(first.spec, pool, 1)
    is_small = not any(candidate.efficient for degree, candidate in alone.items() if degree > 1)
    if limit == 1 or not is_small or not count_steps_left(first):
        return []
    members = [first]
    for other in others:
        if len(members) >= limit:
            break
        if tick.kinds[other.spec.request_id] != tick.kinds[first.spec.request_id] or not count_steps_left(other):
            continue
        together = [*members, other]
        candidate = tick.find_batch_candidates(together, pool).get(1)
        if candidate is not None and _compromises_nobody(tick, pool, together, candidate):
            members.append(other)
    return members[1:]


def _compromises_nobody(
    tick: StepTick, pool: int, members: Sequence[PendingRequest], candidate: BatchCandidate
) -> bool:
    """True when all members are in time even if all their steps are as long as this batch's, but for those that are
    late at every degree. That a wider degree may make up for it later does not count: its workers may be busy."""
    for member in members:
        fastest = tick.find_batch_candidates([member], pool).values()
        is_lost = all(tick.expected_finish_s(member, each) > member.deadline_s for each in fastest)
        if not is_lost and tick.expected_finish_s(member, candidate) > member.deadline_s:
            return False
    return True
