"""Batches of requests that are alike (TridentServe, arXiv 2510.02838, appendix E.1).

D runs all members of a batch together; up to the optimal batch of the profile that takes less than a fifth longer than
one alone, so whoever joins costs hardly anything. The paper forms batches before it solves (`batch_first`). In the
default members join after the solve (`form_batch`), when it is known which requests have no group: with idle workers
for all, none is slowed down by sharing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from dispatch.candidates.candidate import Candidate
from dispatch.candidates.work import Waiting, Work
from tridentserve.protocols import PendingRequest

# The candidate for this many members in the group that was chosen, as queues stand now; None where memory forbids it.
ForBatch = Callable[[int], Candidate | None]
# The members of each batch that was formed before the solve, earliest deadline first, by the id of the first.
Batches = Mapping[str, Sequence[PendingRequest]]


def batch_first(waiting: Waiting, find_limit: Callable[[Work], int]) -> tuple[Waiting, Batches]:
    """Requests in batches: what waits, with the first member in the place of each batch and the work of all of them,
    and the members. `find_limit`: the most members for requests with some work. A batch does not wait to be full."""
    leaders: dict[Work, list[PendingRequest]] = {}
    batches: dict[str, Sequence[PendingRequest]] = {}
    for work, requests in waiting.items():
        limit = find_limit(work) if len(requests) > 1 else 1
        formed = [requests[start : start + limit] for start in range(0, len(requests), limit)]
        for size, alike in groupby(formed, key=len):  # the last one may be smaller
            leaders[work._replace(batch=size)] = firsts = []
            for members in alike:
                firsts.append(members[0])
                batches[members[0].spec.request_id] = members
    return leaders, batches


def form_batch(
    first: PendingRequest,
    others: Sequence[PendingRequest],
    limit: int,
    for_batch: ForBatch,
    best_finish_s: float,
    now_s: float,
) -> list[PendingRequest]:
    """The members of a batch of at most `limit`: `first`, and others with equal work (given earliest deadline first).

    No request that would be in time becomes late: either every member is in time with the times of the whole batch, or
    all are late and could not be in time any more (`best_finish_s`: the earliest that such work can still end
    anywhere).
    """
    members = [first]
    alone = for_batch(1) if limit > 1 else None
    if alone is None:
        return members
    in_time = alone.finish_s(now_s) <= first.deadline_s
    for other in others:
        if len(members) >= limit:
            break
        together = for_batch(len(members) + 1)
        if together is None:
            break
        if in_time:
            earliest_s = min(member.deadline_s for member in (*members, other))
            may_join = together.finish_s(now_s) <= earliest_s
        else:
            may_join = best_finish_s > other.deadline_s
        if may_join:
            members.append(other)
    return members
