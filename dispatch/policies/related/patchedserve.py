"""PatchedServe: least slack first, throughput first while no request is urgent, hopeless requests are discarded.

After PatchedServe, arXiv 2501.09253, section 6 (Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dispatch.options import MAX_BATCH
from dispatch.policies.greedy.placements import co_locate
from dispatch.policies.greedy.work import count_steps_left
from dispatch.policies.policy import Policy, PolicyContext, register_policy
from dispatch.policies.step_level.dispatcher import (
    BatchCandidate,
    StepLevelDispatcher,
    StepTick,
    find_batch_kind,
)
from dispatch.policies.step_level.running_batches import RunningBatch, find_running_batches
from dispatch.policies.step_level.worker_picker import WorkerPicker
from tridentserve.protocols import Assignment, ClusterView, Decisions, PendingRequest, Preemption, Refusal

# The most urgent request is relaxed from this slack score on: one whole latency to spare. The paper gives no figure.
RELAXED_SLACK = 1.0


@register_policy("patchedserve", needs_load=True, default_max_batch=MAX_BATCH)
def make_patchedserve(context: PolicyContext) -> Policy:
    """The whole pipeline is on every worker, as in the paper."""
    dispatcher = PatchedServe(context.times, context.options)
    return Policy(dispatcher, co_locate(context.workers, context.load), replanner_wanted=False)


class PatchedServe(StepLevelDispatcher):
    """Each worker set (the narrowest degree that fits, the paper's one GPU) has an active batch. Requests that wait are
    ordered by slack score, (deadline - time since arrival - predicted rest) / latency alone; while the least is
    relaxed, by how much their kind gains from batching. Each starts on idle workers, else joins the active batch of its
    kind if no member of that gets late because of it (the schedulability test). One that would be late even alone and
    at once is refused. What has begun is neither refused nor displaced: a batch that a request joins stops at its next
    step boundary and resumes on its workers, with the new member.

    Left out: batches of mixed sizes by patches and the patch cache (sections 4 and 5), which change the result; batches
    here are of equal shape, and what this policy gains it gains by its order, its schedulability test and its refusals.
    Each worker set takes from one queue; the paper gives a request to a GPU when it arrives (8.2). The cost model takes
    the place of the latency predictor (section 6.1).
    """

    def decide(self, view: ClusterView) -> Decisions:
        """Starts, joins and refusals."""
        tick = self._build_tick(view)
        begun = sorted((r for r in view.pending if r.steps_done > 0), key=lambda r: (r.arrival_s, r.spec.request_id))
        waiting = [request for request in view.pending if request.steps_done == 0]
        hopeless = [request for request in waiting if _is_hopeless(tick, request)]
        refused = {request.spec.request_id for request in hopeless}
        left = [request for request in waiting if request.spec.request_id not in refused]
        assignments: list[Assignment] = []
        preemptions: list[Preemption] = []
        for index, pool in enumerate(tick.pools):
            picker = WorkerPicker(pool)
            active = _PatchedPool(tick, index, picker, find_running_batches(view.running, picker))
            active.resume([request for request in begun if active.find_candidate([request])], left)
            active.admit(left)
            assignments += active.assignments
            preemptions += active.preemptions
            begun = [request for request in begun if request.spec.request_id not in active.served]
            left = [request for request in left if request.spec.request_id not in active.served]
        refusals = (
            Refusal(request.spec.request_id, f"patchedserve: late by {-slack_s:.2f} s even if it started now")
            for request in hopeless
            if (slack_s := _compute_best_slack_s(tick, request)) is not None
        )
        return Decisions(tuple(assignments), tuple(preemptions), tuple(refusals))


def _find_narrowest(tick: StepTick, members: Sequence[PendingRequest], pool: int) -> BatchCandidate | None:
    return next(iter(tick.find_batch_candidates(members, pool).values()), None)


def _compute_best_slack_s(tick: StepTick, request: PendingRequest) -> float | None:
    """Seconds to spare if the request starts now, alone, in its best pool. None where it cannot run at all."""
    candidates = [
        candidate
        for pool in range(len(tick.pools))
        if (candidate := _find_narrowest(tick, [request], pool)) is not None
    ]
    return max(
        (request.deadline_s - tick.expected_finish_s(request, candidate) for candidate in candidates), default=None
    )


def _is_hopeless(tick: StepTick, request: PendingRequest) -> bool:
    slack_s = _compute_best_slack_s(tick, request)
    return slack_s is not None and slack_s < 0


@dataclass(slots=True)
class _PatchedPool:
    """One pool in one tick."""

    tick: StepTick
    index: int
    picker: WorkerPicker
    active: list[RunningBatch]
    assignments: list[Assignment] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    served: set[str] = field(default_factory=set)

    def find_candidate(self, members: Sequence[PendingRequest]) -> BatchCandidate | None:
        return _find_narrowest(self.tick, members, self.index)

    def resume(self, begun: Sequence[PendingRequest], waiting: Sequence[PendingRequest]) -> None:
        """Batches that were stopped resume first, on their workers if these are idle, with the requests that join."""
        for first in begun:
            if first.spec.request_id not in self.served:
                others = [other for other in begun if other is not first and other.spec.request_id not in self.served]
                others.sort(key=lambda other: other.held_by != first.held_by)
                self._start(first, others, waiting)

    def admit(self, waiting: Sequence[PendingRequest]) -> None:
        """Algorithm 1 for the requests that wait."""
        able = [
            request
            for request in waiting
            if self.find_candidate([request]) and request.spec.request_id not in self.served
        ]
        ordered = sorted(able, key=self._order)
        for request in ordered:
            if request.spec.request_id not in self.served and not self._start(request, (), ordered):
                self._join(request)

    def _order(self, request: PendingRequest) -> tuple[bool, float, float, str]:
        """The urgent by slack score; then, in throughput mode, those whose kind gains most from a batch."""
        alone = next(iter(self.tick.find_batch_candidates([request], self.index).values()))
        latency_s = alone.encode_s + request.spec.num_inference_steps * alone.step_s + alone.decode_s
        slack = (request.deadline_s - self.tick.expected_finish_s(request, alone)) / max(latency_s, 1e-9)
        relaxed = slack >= RELAXED_SLACK
        gain = self._compute_batching_gain(request, alone) if relaxed else 0.0
        return relaxed, -gain, slack, request.spec.request_id

    def _compute_batching_gain(self, request: PendingRequest, alone: BatchCandidate) -> float:
        """The share of a step's seconds that a full batch saves each of its members."""
        degree = alone.degree
        batch = self.tick.find_batch_limit(request.spec, self.index, degree)
        together = self.tick.find_candidates(request.spec, self.index, batch).get(degree)
        return 1.0 - together.step_s / batch / alone.step_s if together is not None and alone.step_s else 0.0

    def _start(self, first: PendingRequest, begun: Sequence[PendingRequest], waiting: Sequence[PendingRequest]) -> bool:
        """Start a request on its workers or on idle ones, in one batch with all requests that may join it."""
        alone = self.find_candidate([first])
        if alone is None or self.picker.num_idle < (degree := alone.degree):
            return False
        held = (first.held_by,) if first.held_by is not None and degree == 1 else ()
        workers = held if self.picker.keep(held) else self.picker.take(degree)
        if workers is None:
            return False
        members = [first]
        self.tick.grow(members, begun, self.index, degree, strict=False)
        taken = self.served | {member.spec.request_id for member in members}
        joining = [other for other in waiting if other.spec.request_id not in taken]
        self.tick.grow(members, joining, self.index, degree, strict=True)
        candidate = self.tick.find_batch_candidates(members, self.index)[degree]
        slack_s = first.deadline_s - self.tick.expected_finish_s(first, candidate)
        reason = f"patchedserve: batch of {len(members)}, {slack_s:.2f} s of slack"
        self.assignments.append(self.tick.build_assignment(members, candidate, workers, reason))
        self.served.update(member.spec.request_id for member in members)
        return True

    def _join(self, request: PendingRequest) -> None:
        """Into the smallest active batch of its kind that stays in time with it."""
        for batch in sorted(self.active, key=lambda batch: batch.size):
            limit = self.tick.find_batch_limit(request.spec, self.index, len(batch.workers))
            if (
                batch.kind == find_batch_kind(request.spec)
                and batch.size < limit
                and self._is_schedulable(batch, request)
            ):
                batch.promised += 1
                self.preemptions += batch.stop(f"patchedserve: {request.spec.request_id} joins")
                return

    def _is_schedulable(self, batch: RunningBatch, request: PendingRequest) -> bool:
        """Algorithm 1, lines 16 to 18: with one more, each request still ends in time that would without."""
        degree, now_s = len(batch.workers), self.tick.now_s
        before = self.tick.find_candidates(request.spec, self.index, batch.size, encoded=True).get(degree)
        after = self.tick.find_candidates(request.spec, self.index, batch.size + 1).get(degree)
        if before is None or after is None:
            return False
        rest = [(m.spec.num_inference_steps - m.steps_done, m.deadline_s) for m in batch.members]
        own_s = now_s + after.encode_s + count_steps_left(request) * after.step_s + after.decode_s
        return own_s <= request.deadline_s and all(
            now_s + after.encode_s + steps * after.step_s + after.decode_s <= deadline_s
            or now_s + steps * before.step_s + before.decode_s > deadline_s
            for steps, deadline_s in rest
        )
