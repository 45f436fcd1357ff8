"""Nothing starves: the longest overdue request goes first, and width that does not come by itself is kept for it.

The late reward of TridentServe (arXiv 2510.02838, appendix C.2) ends at that of a request in time. From there on prices
would decide: a large request, which pays more for communication, would lose to every small one for as long as small
ones come; and one that needs several workers at once would never find them idle in the same tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dispatch.candidates.tick_view import TickView
from dispatch.candidates.work import Work
from tridentserve.plans import WorkerId
from tridentserve.protocols import PendingRequest, WorkerView


def find_longest_overdue(by_deadline: Sequence[PendingRequest], tick: TickView) -> list[PendingRequest]:
    """Find each pool's request with the earliest deadline among those whose late reward cannot grow any more.

    No two of them could run in the same pool, so all of those that have a group now can have it at once. Only the first
    goes before all others: the rest still share the workers by value. That is enough, as deadlines do not change and
    new requests arrive with later ones: each request has its turn after finitely many others.
    """
    chosen: list[PendingRequest] = []
    claimed: set[int] = set()
    for request in by_deadline:
        work = Work.from_pending(request)
        if tick.appraise(work).is_fully_aged(request.deadline_s):
            pools = {candidate.group.pool for candidate in tick.survey(work).candidates}
            if not pools & claimed:
                chosen.append(request)
            claimed |= pools
    return chosen


def hold_back(requests: Sequence[PendingRequest], tick: TickView) -> dict[WorkerId, WorkerView]:
    """Workers that others must not use, as others see them: those that complete the earliest group of a request without
    one count as busy until its D would end there.

    While they are held the group can only come sooner, so another node is chosen only where that is earlier yet.
    """
    held: dict[WorkerId, WorkerView] = {}
    for request in requests:
        work = Work.from_pending(request)
        if not tick.appraise(work).compute_values(request.deadline_s):
            earliest = min(
                tick.survey(work).candidates,
                key=lambda candidate: (candidate.earliest_start_s, candidate.group.degree, candidate.group.pool),
            )
            until_s = earliest.diffuse_end_s(earliest.earliest_start_s)
            members = tick.pools[earliest.group.pool].find_first_free(earliest.group.degree, tick.now_s)
            held.update(
                (worker.worker_id, replace(worker, idle=False, free_at_s=max(until_s, worker.free_at_s)))
                for worker in members
            )
    return held
