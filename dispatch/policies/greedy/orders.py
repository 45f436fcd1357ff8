"""The orders in which requests have their turn, and what follows when one cannot start (section 8.1, appendix D.2).

FIFO, shortest remaining time first with aging (SRTF), earliest deadline first (EDF). TridentServe, arXiv 2510.02838.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from dispatch.candidates.work import FindWork, Work
from dispatch.policies.greedy.work import WorkTimes, make_fresh_request
from tridentserve.errors import ProfileError
from tridentserve.protocols import PendingRequest

# Overtime in runtimes from which on a request is as urgent as one that can be in time: where the paper's late
# reward (TridentServe, arXiv 2510.02838, appendix C.2) ends. Appendix D.2 names the scale and no figure.
FULLY_AGED = 9


class IfItWaits(Enum):
    """The effect of a request that cannot start now on the requests after it."""

    PASS = auto()  # they may overtake it
    HOLD = auto()  # they may, but the workers that it can have first are kept for it
    BLOCK = auto()  # they wait too


@dataclass(frozen=True, slots=True)
class Turn:
    request: PendingRequest
    if_it_waits: IfItWaits


Order = Callable[[Sequence[PendingRequest], WorkTimes, float, FindWork], Iterable[Turn]]


def fifo(pending: Sequence[PendingRequest], work: WorkTimes, now_s: float, find_work: FindWork) -> Iterator[Turn]:
    """Requests by arrival; no request overtakes another one of its bucket."""
    return (Turn(request, IfItWaits.BLOCK) for request in sorted(pending, key=_by_arrival))


def edf(pending: Sequence[PendingRequest], work: WorkTimes, now_s: float, find_work: FindWork) -> Iterator[Turn]:
    """Requests by deadline. Workers are kept for the first one once it is late, so that nothing starves."""
    ordered = sorted(pending, key=_by_deadline)
    for rank, request in enumerate(ordered):
        yield Turn(request, IfItWaits.HOLD if rank == 0 and request.deadline_s < now_s else IfItWaits.PASS)


def srtf(pending: Sequence[PendingRequest], work: WorkTimes, now_s: float, find_work: FindWork) -> Iterator[Turn]:
    """Requests by priority, then by remaining time at the optimal degree (appendix D.2).

    A request that can be in time if it starts now has the top priority, 0. Another has 9 at first and gains one per
    runtime of overtime, until it is 0 too. As shorter ones would still always go first, and wide ones never find
    their workers idle at once, the longest overdue of the fully aged has the first turn and workers are kept for it.
    """
    memo: dict[Work, tuple[float, float] | None] = {}
    keyed: list[tuple[int, float, float, str, PendingRequest]] = []  # ids differ, so that requests are not compared
    starved: PendingRequest | None = None
    for request in pending:
        left = find_work(request)
        if left not in memo:
            memo[left] = _estimate_remaining_and_whole_s(request, work)
        if (seconds := memo[left]) is None:
            continue
        remaining_s, whole_s = seconds
        overtime_s = now_s + remaining_s - request.deadline_s
        level = compute_priority(overtime_s, whole_s)
        if level == 0 and overtime_s > 0:
            starved = request if starved is None else min(starved, request, key=_by_deadline)
        keyed.append((level, remaining_s, request.arrival_s, request.spec.request_id, request))
    keyed.sort()
    if starved is not None:
        yield Turn(starved, IfItWaits.HOLD)
    for item in keyed:
        if item[4] is not starved:
            yield Turn(item[4], IfItWaits.PASS)


def compute_priority(overtime_s: float, runtime_s: float) -> int:
    """0 (first) for a request in time and for a fully aged one. `overtime_s`: by how much it would be late."""
    if overtime_s <= 0:
        return 0
    return max(0, FULLY_AGED - math.floor(overtime_s / runtime_s))


def _estimate_remaining_and_whole_s(request: PendingRequest, work: WorkTimes) -> tuple[float, float] | None:
    """Seconds of the rest and of the whole request at the optimal degree. None when it was not profiled."""
    try:
        degree = work.optimal_degree(request.spec)
        return work.run_s(request, degree), work.run_s(make_fresh_request(request.spec), degree)
    except ProfileError:
        return None


def _by_arrival(request: PendingRequest) -> tuple[float, str]:
    return request.arrival_s, request.spec.request_id


def _by_deadline(request: PendingRequest) -> tuple[float, float, str]:
    return request.deadline_s, request.arrival_s, request.spec.request_id
