"""From waiting requests to the assignment problem: requests that are alike become one class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dispatch.candidates.survey import TickView
from dispatch.candidates.values import OVERDUE, Appraisal, Standing
from dispatch.candidates.work import FindWork, Waiting, Work
from dispatch.solver.problem import GroupKind, Problem, RequestClass
from tridentserve.protocols import PendingRequest


class Members(NamedTuple):
    """The requests of one class, earliest deadline first."""

    work: Work
    requests: Sequence[PendingRequest]


def by_deadline(request: PendingRequest) -> tuple[float, float, str]:
    """The order among equals: deadline, then arrival, then id."""
    return request.deadline_s, request.arrival_s, request.spec.request_id


def group_by_work(
    pending: Iterable[PendingRequest], models: frozenset[str], find_work: FindWork = Work.from_pending
) -> Waiting:
    """The requests for some models."""
    grouped: defaultdict[Work, list[PendingRequest]] = defaultdict(list)
    for request in pending:
        if request.spec.model in models:
            grouped[find_work(request)].append(request)
    for requests in grouped.values():
        requests.sort(key=by_deadline)
    return grouped


def leave_out(waiting: Waiting, request_ids: Collection[str]) -> Waiting:
    """The requests but for some."""
    left: dict[Work, list[PendingRequest]] = {}
    for work, requests in waiting.items():
        others = [request for request in requests if request.spec.request_id not in request_ids]
        if others:
            left[work] = others
    return left


def split_by_standing(
    requests: Sequence[PendingRequest], appraisal: Appraisal
) -> Iterator[tuple[Standing, Sequence[PendingRequest]]]:
    """Runs of requests with the same standing, of requests with the same work by deadline. Those that stand alike
    follow each other, so that the standings in between need not be looked at where many wait."""
    start, standing = 0, None
    while start < len(requests):
        standing = standing or appraisal.find_standing(requests[start].deadline_s)
        end, step, following = start + 1, 1, None
        while end < len(requests):
            at = min(end + step, len(requests)) - 1
            if (reached := appraisal.find_standing(requests[at].deadline_s)) == standing:
                end, step = at + 1, 2 * step
            elif step == 1:
                following = reached
                break
            else:
                step = max(1, step // 4)
        yield standing, requests[start:end]
        start, standing = end, following


def build_problem(
    waiting: Waiting, required: Iterable[PendingRequest], tick: TickView, weights: Mapping[str, float]
) -> tuple[list[Members], Problem]:
    """The classes of identical requests, by earliest deadline, and the members of each. Each of `required` that has a
    group now is a class of its own, which must get one; they are the first of their work. `weights`: by model, what
    values are multiplied by in addition to the requests' own weights."""
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
        for standing, alike in split_by_standing(rest, appraisal):
            if values := appraisal.compute_values_at(standing):
                found.append((Members(work, alike), values, False))
    found.sort(key=lambda item: by_deadline(item[0].requests[0]))
    share = tick.program.order_share
    classes: list[RequestClass] = []
    for rank, (members, values, is_required) in enumerate(found):
        weight, order = weights[members.work.model] * members.work.weight, 1 + share * (1 - rank / len(found))
        weighed = {group: weight * value * order for group, value in values.items()}
        classes.append(RequestClass(len(members.requests), weighed, is_required))
    return [members for members, _, _ in found], Problem(tuple(classes), tick.idle)
