"""From waiting requests to the assignment problem: requests that are alike become one class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from dispatch.candidates.survey import TickView
from dispatch.candidates.values import OVERDUE
from dispatch.candidates.work import Waiting, Work
from dispatch.solver.problem import GroupKind, Problem, RequestClass
from tridentserve.protocols import PendingRequest


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
