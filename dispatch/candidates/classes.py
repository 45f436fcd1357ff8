"""From waiting requests to the assignment problem: requests that are alike become one class, and nothing starves.

A hopeless request is worth next to nothing, so it would wait for as long as others come that can be in time; and one
that needs several workers at once might never find them idle in the same tick. So the longest overdue request goes
first, once it is overdue by many times its own runtime, and width that does not come by itself is kept for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from dispatch.candidates.survey import TickView
from dispatch.candidates.values import OVERDUE
from dispatch.candidates.work import Waiting, Work
from dispatch.solver.problem import GroupKind, Problem, RequestClass
from tridentserve.plans import WorkerId
from tridentserve.protocols import PendingRequest, WorkerView


@dataclass(frozen=True, slots=True)
class Members:
    """The requests of one class, earliest deadline first."""

    work: Work
    requests: Sequence[PendingRequest]


def by_deadline(request: PendingRequest) -> tuple[float, float, str]:
    """The order among equals: deadline, then arrival, then id."""
    return request.deadline_s, request.arrival_s, request.spec.request_id


def group_by_work(pending: Iterable[PendingRequest], models: frozenset[str]) -> Waiting:
    """The requests for some models."""
    grouped: defaultdict[Work, list[PendingRequest]] = defaultdict(list)
    for request in pending:
        if request.spec.model in models:
            grouped[Work.from_pending(request)].append(request)
    for requests in grouped.values():
        requests.sort(key=by_deadline)
    return grouped


def build_problem(
    waiting: Waiting, required: Iterable[PendingRequest], tick: TickView, weights: Mapping[str, float]
) -> tuple[list[Members], Problem]:
    """The classes of identical requests, by earliest deadline, and the members of each. Each of `required` that has a
    group now is a class of its own, which must get one; they are the first of their work. `weights`: by model, what
    values are multiplied by."""
    first = {request.spec.request_id for request in required}
    found: list[tuple[Members, Mapping[GroupKind, float], bool]] = []
    for work, requests in waiting.items():
        appraisal = tick.appraise(work)
        if not appraisal.can_run_now:
            continue
        is_required = requests[0].spec.request_id in first
        if is_required and (values := appraisal.compute_values_at(OVERDUE)):
            found.append((Members(work, requests[:1]), values, True))
        rest = requests[1:] if is_required else requests
        for standing, alike in groupby(rest, key=lambda request: appraisal.find_standing(request.deadline_s)):
            if values := appraisal.compute_values_at(standing):
                found.append((Members(work, list(alike)), values, False))
    found.sort(key=lambda item: by_deadline(item[0].requests[0]))
    share = tick.program.order_share
    classes = [
        RequestClass(
            count=len(members.requests),
            values={
                group: weights[members.work.model] * value * (1 + share * (1 - rank / len(found)))
                for group, value in values.items()
            },
            required=is_required,
        )
        for rank, (members, values, is_required) in enumerate(found)
    ]
    return [members for members, _, _ in found], Problem(tuple(classes), tick.idle)


def find_longest_overdue(by_deadline: Sequence[PendingRequest], tick: TickView) -> list[PendingRequest]:
    """Find each pool's request with the earliest deadline among those that are long overdue.

    No two of them could run in the same pool, so all of those that have a group now can have it at once. Only the first
    goes before all others: the rest still share the workers by value. That is enough, as deadlines do not change and
    new requests arrive with later ones: each request has its turn after finitely many others.
    """
    chosen: list[PendingRequest] = []
    claimed: set[int] = set()
    for request in by_deadline:
        work = Work.from_pending(request)
        if tick.appraise(work).is_long_overdue(request.deadline_s):
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
        if not tick.appraise(work).compute_values_at(OVERDUE):
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
