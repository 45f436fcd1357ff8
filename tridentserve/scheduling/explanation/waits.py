"""The times in which a request did not compute, and what it waited for in each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tridentserve.plans import WorkerId
from tridentserve.scheduling.explanation.chronicle import Booking, Chronicle, Life, LoggedPlan
from tridentserve.stages import Stage

WaitKind = Literal[
    "busy",  # the workers that it ran on later had other requests
    "wider",  # fewer workers were free than it ran on later
    "cores",  # workers were free, but not the cores of their node
    "held back",  # as many workers were free as it ran on later
    "loading",  # weights came into its workers
    "starting",  # inputs and the start of a plan
    "reporting",  # the report of a plan's end
]


# Kinds of waits for other requests.
BLOCKED: tuple[WaitKind, ...] = ("busy", "wider", "cores")
_ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True)
class WaitStretch:
    """One stretch of waiting for one thing."""

    kind: WaitKind
    start_s: float
    end_s: float
    request_ids: tuple[str, ...] = ()
    """The requests that had its workers."""
    workers: tuple[WorkerId, ...] = ()
    """The workers that it waited for; where it was held back, those that were free."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def list_waits(chronicle: Chronicle, life: Life) -> list[WaitStretch]:
    """All waits of a request, in order; those of one kind for the same requests that follow each other are one."""
    merged: list[WaitStretch] = []
    for wait in _list_all(chronicle, life):
        last = merged[-1] if merged else None
        follows = last is not None and abs(last.end_s - wait.start_s) < _ROUNDING_S
        if last is not None and follows and (last.kind, last.request_ids) == (wait.kind, wait.request_ids):
            workers = tuple(dict.fromkeys((*last.workers, *wait.workers)))
            merged[-1] = WaitStretch(wait.kind, last.start_s, wait.end_s, wait.request_ids, workers)
        elif wait.seconds > _ROUNDING_S:
            merged.append(wait)
    return merged


def sum_blockers(waits: Sequence[WaitStretch]) -> dict[str, float]:
    """Seconds for which each other request had workers that it waited for, the longest first."""
    found: defaultdict[str, float] = defaultdict(float)
    for wait in waits:
        if wait.kind in BLOCKED:
            for request_id in wait.request_ids:
                found[request_id] += wait.seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def sum_kinds(waits: Sequence[WaitStretch]) -> dict[WaitKind, float]:
    """Seconds of each kind of wait, the longest first."""
    found: defaultdict[WaitKind, float] = defaultdict(float)
    for wait in waits:
        found[wait.kind] += wait.seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _list_all(chronicle: Chronicle, life: Life) -> Iterator[WaitStretch]:
    """A request waits for a dispatch before its first plan, after it was stopped between steps and after a failure; and
    for its workers, weights and inputs between a plan and its first stage."""
    since_s, was_cut = life.arrival_s, True
    for logged in life.plans:
        target = life.find_diffuse_after(logged)
        if was_cut:
            yield from _list_queueing(chronicle, life, since_s, logged, target)
        else:
            yield from _list_after_dispatch(chronicle, life, since_s, logged.sent_s, logged)
        since_s = max(since_s, logged.sent_s)
        for span in logged.spans:
            yield from _list_after_dispatch(chronicle, life, since_s, span.start_s, logged)
            since_s = max(since_s, span.end_s)
        if logged.reported_s is not None:
            yield WaitStretch("reporting", since_s, max(since_s, logged.reported_s))
            since_s = max(since_s, logged.reported_s)
        was_cut = logged.outcome != "finished" or _has_steps_left(life, logged)
    end_s = chronicle.told_until_s if life.end_s is None else life.end_s
    if was_cut and end_s > since_s:
        yield from _list_unserved(chronicle, life, since_s, end_s)


def _has_steps_left(life: Life, logged: LoggedPlan) -> bool:
    """True after a plan that denoised a part of the steps, as it was assigned no more: a segment."""
    steps = next((m.steps for m in logged.plan.members if m.request_id == life.request_id), None)
    return Stage.DIFFUSE in logged.plan.stages and steps is not None and steps[1] < life.spec.num_inference_steps


def _list_queueing(
    chronicle: Chronicle, life: Life, start_s: float, logged: LoggedPlan, target: LoggedPlan
) -> Iterator[WaitStretch]:
    """It waits for a dispatch, which gave it the workers of `target`."""
    workers = target.plan.workers
    is_diffuse = Stage.DIFFUSE in target.plan.stages
    able = chronicle.list_able(life.spec.model, start_s) | set(workers) if is_diffuse else set(workers)
    sharing, limit = chronicle.list_sharing(workers[0], start_s) if is_diffuse else (set[WorkerId](), None)
    for begin_s, end_s in _cut(chronicle, able | sharing, start_s, logged.sent_s):
        others = _find_holders(chronicle, life, workers, begin_s, end_s)
        free = _list_free(chronicle, life, able, begin_s, end_s)
        taken = sharing.difference(_list_free(chronicle, life, sharing, begin_s, end_s))
        has_cores = limit is None or len(taken) + len(workers) <= limit or not taken
        if len(free) >= len(workers) and not has_cores:
            holders = _find_holders(chronicle, life, tuple(sorted(taken)), begin_s, end_s)
            yield WaitStretch("cores", begin_s, end_s, holders, workers)
        elif len(free) >= len(workers):
            yield WaitStretch("held back", begin_s, end_s, (), free)
        elif others:
            yield WaitStretch("wider" if free else "busy", begin_s, end_s, others, workers)
        else:
            yield WaitStretch("held back", begin_s, end_s, (), workers)


def _list_unserved(chronicle: Chronicle, life: Life, start_s: float, end_s: float) -> Iterator[WaitStretch]:
    """It waits for a dispatch that never came."""
    able = chronicle.list_able(life.spec.model, start_s)
    for begin_s, until_s in _cut(chronicle, able, start_s, end_s):
        free = _list_free(chronicle, life, able, begin_s, until_s)
        if free:
            yield WaitStretch("held back", begin_s, until_s, (), free)
        else:
            holders = _find_holders(chronicle, life, tuple(sorted(able)), begin_s, until_s)
            yield WaitStretch("busy", begin_s, until_s, holders, tuple(sorted(able)))


def _list_after_dispatch(
    chronicle: Chronicle, life: Life, start_s: float, end_s: float, logged: LoggedPlan
) -> Iterator[WaitStretch]:
    """It has its workers, and waits until they can begin."""
    workers = logged.plan.workers
    loads = [load for load in chronicle.loads if load.worker_id in workers and load.end_s > start_s]
    cuts = {time_s for load in loads for time_s in (load.start_s, load.end_s)}
    for begin_s, until_s in _cut(chronicle, set(workers), start_s, end_s, cuts):
        middle_s = (begin_s + until_s) / 2
        if others := _find_holders(chronicle, life, workers, begin_s, until_s):
            yield WaitStretch("busy", begin_s, until_s, others, workers)
        elif loading := tuple(dict.fromkeys(ld.worker_id for ld in loads if ld.start_s <= middle_s < ld.end_s)):
            yield WaitStretch("loading", begin_s, until_s, (), loading)
        else:
            yield WaitStretch("starting", begin_s, until_s, (), workers)


def _cut(
    chronicle: Chronicle, workers: set[WorkerId], start_s: float, end_s: float, cuts: set[float] | None = None
) -> Iterator[tuple[float, float]]:
    """The stretches of a time in which the bookings of these workers stay the same."""
    if end_s <= start_s:
        return
    times = {start_s, end_s, *(cuts or ())}
    for worker_id in workers:
        for booking in chronicle.list_bookings(worker_id):
            times.update((booking.start_s, booking.end_s))
    yield from pairwise(sorted(time_s for time_s in times if start_s <= time_s <= end_s))


def _find_bookings(chronicle: Chronicle, worker_id: WorkerId, start_s: float, end_s: float) -> list[Booking]:
    middle_s = (start_s + end_s) / 2
    return [each for each in chronicle.list_bookings(worker_id) if each.start_s <= middle_s < each.end_s]


def _find_holders(
    chronicle: Chronicle, life: Life, workers: tuple[WorkerId, ...], start_s: float, end_s: float
) -> tuple[str, ...]:
    """The other requests that had some of these workers."""
    found = (
        request_id
        for worker_id in workers
        for booking in _find_bookings(chronicle, worker_id, start_s, end_s)
        if life.request_id not in booking.request_ids
        for request_id in booking.request_ids
    )
    return tuple(dict.fromkeys(found))


def _list_free(
    chronicle: Chronicle, life: Life, able: set[WorkerId], start_s: float, end_s: float
) -> tuple[WorkerId, ...]:
    """The workers that nobody else had."""
    return tuple(
        worker_id for worker_id in sorted(able) if not _find_holders(chronicle, life, (worker_id,), start_s, end_s)
    )
