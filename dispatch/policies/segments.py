"""Segments: the earliest deadline first, a second of D at a time, each at the degree that deadline and load call for.

Not a published method but a bar for the default: a greedy policy that knows deadlines, degrees and the load, and that
decides anew for a request after each segment of its D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dispatch.assignment.assigning import count_segment_steps
from dispatch.candidates.classes import by_deadline
from dispatch.policies.greedy.work import count_steps_left
from dispatch.policies.policy import Policy, PolicyContext, register_policy
from dispatch.policies.step_level.dispatcher import BatchCandidate, StepLevelDispatcher, StepTick
from dispatch.policies.step_level.worker_picker import WorkerPicker
from tridentserve.protocols import Assignment, ClusterView, Decisions, PendingRequest

# A narrower degree must cost at most this share of the GPU-seconds, and leave this share of the time from arrival to
# deadline: narrow runs that save nothing spend slack for nothing.
_SAVING = 0.97
_KEPT_SLACK = 0.1


@register_policy("segments")
def make_segments(context: PolicyContext) -> Policy:
    return Policy(Segments(context.times, context.options))


class _Way(NamedTuple):
    """One way to run what is left of a request."""

    degree: int
    finish_s: float
    """The time at which the request ends if it keeps this degree."""
    pool: int
    candidate: BatchCandidate
    gpu_seconds: float
    """Those of all that is left."""


@dataclass(frozen=True, slots=True)
class _Contender:
    """A request that some idle cluster could run."""

    pending: PendingRequest
    in_time: Sequence[_Way]
    """The ways that meet its deadline; empty when it is hopeless."""
    wanted: _Way
    """Its optimal degree, or the narrowest in time where that one is too late."""
    narrower: Sequence[_Way]
    """Ways at fewer workers, the widest first, that meet the deadline if any does."""

    @property
    def least_gpu_seconds(self) -> float:
        return min(way.gpu_seconds for way in (self.wanted, *self.narrower))

    def choose_cheap(self) -> _Way:
        """The narrowest way that saves GPU-seconds and keeps some slack, else the wanted one."""
        pending = self.pending
        latest_s = pending.deadline_s - _KEPT_SLACK * (pending.deadline_s - pending.arrival_s)
        cheap = [
            way
            for way in self.narrower
            if way.gpu_seconds <= _SAVING * self.wanted.gpu_seconds and way.finish_s <= latest_s
        ]
        return min(cheap, default=self.wanted)


class Segments(StepLevelDispatcher):
    """Requests that can still be in time come first, by deadline, at the optimal degree, or at the narrowest that is
    enough where that one is not. Where they want more workers than are idle, each takes the narrowest degree that saves
    GPU-seconds without using up its slack. Hopeless requests come last, the smallest first."""

    def decide(self, view: ClusterView) -> Decisions:
        """A segment for each request that gets workers. Nothing is preempted or refused."""
        if not view.pending:
            return Decisions()
        tick = self._build_tick(view)
        pickers = [WorkerPicker(pool) for pool in tick.pools]
        num_idle = sum(picker.num_idle for picker in pickers)
        if not num_idle:
            return Decisions()
        waiting = [found for request in view.pending if (found := _survey(tick, request)) is not None]
        hopeful = sorted((each for each in waiting if each.in_time), key=lambda each: by_deadline(each.pending))
        hopeless = sorted(
            (each for each in waiting if not each.in_time),
            key=lambda each: (each.least_gpu_seconds, by_deadline(each.pending)),
        )
        is_pressed = sum(each.wanted.degree for each in hopeful) > num_idle
        assignments: list[Assignment] = []
        for each in (*hopeful, *hopeless):
            first = each.choose_cheap() if is_pressed and each.in_time else each.wanted
            ways = [first, *(way for way in each.narrower if way.degree < first.degree)]
            if (assignment := _start(tick, pickers, each.pending, ways, self._options.segment_s)) is not None:
                assignments.append(assignment)
        return Decisions(tuple(assignments))


def _survey(tick: StepTick, pending: PendingRequest) -> _Contender | None:
    """The ways of a request in all pools; None when there is none."""
    ways = [
        _Way(degree, finish_s, pool, candidate, degree * (finish_s - tick.now_s - candidate.encode_wait_s))
        for pool in range(len(tick.pools))
        for degree, candidate in tick.find_batch_candidates([pending], pool).items()
        for finish_s in (tick.expected_finish_s(pending, candidate),)
    ]
    if not ways:
        return None
    in_time = [way for way in ways if way.finish_s <= pending.deadline_s]
    efficient = [way for way in ways if way.candidate.efficient] or ways
    wanted = max(efficient, key=lambda way: (way.degree, -way.finish_s))
    if in_time and wanted.finish_s > pending.deadline_s:
        wanted = min(in_time)
    narrower = sorted((way for way in in_time or ways if way.degree < wanted.degree), reverse=True)
    return _Contender(pending, in_time, wanted, narrower)


def _start(
    tick: StepTick,
    pickers: Sequence[WorkerPicker],
    pending: PendingRequest,
    ways: Sequence[_Way],
    segment_s: float,
) -> Assignment | None:
    """The next segment on the first of these ways for which workers are idle."""
    for way in ways:
        picker = pickers[way.pool]
        if picker.num_idle >= way.degree and (workers := picker.take(way.degree)) is not None:
            steps = count_segment_steps(count_steps_left(pending), way.candidate.step_s, segment_s)
            slack_s = pending.deadline_s - way.finish_s
            verdict = f"{slack_s:.2f} s to spare" if slack_s >= 0 else f"late by {-slack_s:.2f} s"
            reason = f"segments: {steps} step{'s' * (steps != 1)} at degree {way.degree}, {verdict}"
            return tick.build_assignment([pending], way.candidate, workers, reason, steps)
    return None
