"""PatchedServe: least slack first, throughput first while no request is urgent, hopeless requests are discarded.

After PatchedServe, arXiv 2501.09253, section 6 (Algorithm 1).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from dispatch.policies.greedy.placements import co_locate
from dispatch.policies.greedy.work import count_steps_left
from dispatch.policies.policy import Policy, PolicyContext, register_policy
from dispatch.policies.step_level.dispatcher import BatchCandidate, KindQueue, StepLevelDispatcher, StepTick
from dispatch.policies.step_level.running_batches import RunningBatch, find_running_batches, let_join
from dispatch.policies.step_level.worker_picker import WorkerPicker
from profiler.cost_model import LARGEST_BATCH
from tridentserve.protocols import Assignment, ClusterView, Decisions, PendingRequest, Preemption, Refusal

# The most urgent request is relaxed from this slack score on: one whole latency to spare. The paper gives no figure.
RELAXED_SLACK = 1.0


@register_policy("patchedserve", needs_load=True, default_max_batch=LARGEST_BATCH)
def make_patchedserve(context: PolicyContext) -> Policy:
    """The whole pipeline is on every worker, as in the paper."""
    dispatcher = PatchedServe(context.times, context.options)
    return Policy(dispatcher, co_locate(context.workers, context.load), replanner_wanted=False)


class PatchedServe(StepLevelDispatcher):
    """Each worker set (the narrowest degree that fits, the paper's one GPU) has an active batch. Requests that wait are
    ordered by slack score, (deadline - time since arrival - predicted rest) / latency alone; while the least is
    relaxed, by how much their kind gains from batching. Each starts on idle workers, else joins the active batch of its
    kind if no member of that gets late because of it (the schedulability test). One that would be late even alone and
    at once is refused. What has begun is neither refused nor displaced: a request joins a batch at its next step
    boundary, on its workers, and the others go on when some have ended.

    Requests of several sizes share a batch where `dispatch.pack_sizes` names their model and the profile says that it
    pays: as one packed sequence, or in patches whose result is that of the whole (section 4).

    Left out: the patch cache (section 5), which changes the result. Each worker set takes from one queue; the paper
    gives a request to a GPU when it arrives (8.2). The cost model takes the place of the latency predictor (section
    6.1).
    """

    def decide(self, view: ClusterView) -> Decisions:
        """Starts, joins and refusals."""
        tick = self._build_tick(view)
        begun = sorted((r for r in view.pending if r.steps_done > 0), key=lambda r: (r.arrival_s, r.spec.request_id))
        waiting = [request for request in view.pending if request.steps_done == 0]
        best_slacks_s = {request.spec.request_id: _compute_best_slack_s(tick, request) for request in waiting}
        late_s = {request_id: -slack_s for request_id, slack_s in best_slacks_s.items() if slack_s < 0}
        left = [request for request in waiting if request.spec.request_id not in late_s]
        assignments: list[Assignment] = []
        preemptions: list[Preemption] = []
        for index, pool in enumerate(tick.pools):
            picker = WorkerPicker(pool)
            active = _PatchedPool(tick, index, picker, find_running_batches(tick, view.running, picker))
            active.resume(list(filter(active.can_run, begun)), left)
            active.admit([request for request in left if request.spec.request_id not in active.served])
            assignments += active.assignments
            preemptions += active.preemptions
            begun = [request for request in begun if request.spec.request_id not in active.served]
            left = [request for request in left if request.spec.request_id not in active.served]
        refusals = (
            Refusal(request_id, f"patchedserve: late by {seconds:.2f} s even if it started now")
            for request_id, seconds in late_s.items()
        )
        return Decisions(tuple(assignments), tuple(preemptions), tuple(refusals))


def _find_narrowest(tick: StepTick, request: PendingRequest, pool: int) -> BatchCandidate | None:
    return next(iter(tick.find_batch_candidates([request], pool).values()), None)


def _compute_best_slack_s(tick: StepTick, request: PendingRequest) -> float:
    """Seconds to spare if the request starts now, alone, in its best pool. Infinite where it cannot run at all."""
    candidates = [
        candidate for pool in range(len(tick.pools)) if (candidate := _find_narrowest(tick, request, pool)) is not None
    ]
    slacks_s = [request.deadline_s - tick.expected_finish_s(request, candidate) for candidate in candidates]
    return max(slacks_s, default=math.inf)


class _PatchedPool:
    """One pool in one tick."""

    def __init__(self, tick: StepTick, index: int, picker: WorkerPicker, active: Iterable[RunningBatch]) -> None:
        """`active`: the batches that run in this pool."""
        self.assignments: list[Assignment] = []
        self.preemptions: list[Preemption] = []
        self.served: set[str] = set()
        self._queues: tuple[Mapping[int, KindQueue], ...] = ()
        self._tick = tick
        self._index = index
        self._picker = picker
        self._active: defaultdict[int | None, list[RunningBatch]] = defaultdict(list)
        for batch in active:
            self._active[batch.kind].append(batch)

    def can_run(self, request: PendingRequest) -> bool:
        return _find_narrowest(self._tick, request, self._index) is not None

    def resume(self, begun: Sequence[PendingRequest], waiting: Sequence[PendingRequest]) -> None:
        """Batches that were stopped resume first, on their workers if these are idle, with the requests that join."""
        stopped, queues = self._queues = self._tick.find_queues(begun), self._tick.find_queues(waiting)
        for first in begun:
            kind = self._tick.kinds[first.spec.request_id]
            if first.spec.request_id in stopped[kind]:
                self._start(first, stopped[kind], queues[kind], beside=self._list_waiting(begun))

    def admit(self, waiting: Sequence[PendingRequest]) -> None:
        """Algorithm 1 for the requests that wait."""
        ordered = sorted(filter(self.can_run, waiting), key=self._order)
        queues = self._tick.find_queues(ordered)
        self._queues = (queues,)
        for request in ordered:
            queue = queues[self._tick.kinds[request.spec.request_id]]
            if request.spec.request_id in queue and not self._start(request, {}, queue, self._list_waiting(ordered)):
                self._join(request)
        batches = (batch for batches in self._active.values() for batch in batches)
        joins = let_join(batches, self._tick, self._index, "patchedserve")
        self.assignments += joins.assignments
        self.preemptions += joins.preemptions

    def _order(self, request: PendingRequest) -> tuple[bool, float, float, str]:
        """The urgent by slack score; then, in throughput mode, those whose kind gains most from a batch."""
        alone = next(iter(self._tick.find_batch_candidates([request], self._index).values()))
        latency_s = alone.encode.seconds + request.spec.num_inference_steps * alone.step_s + alone.decode.seconds
        slack = (request.deadline_s - self._tick.expected_finish_s(request, alone)) / max(latency_s, 1e-9)
        relaxed = slack >= RELAXED_SLACK
        gain = self._compute_batching_gain(request, alone) if relaxed else 0.0
        return relaxed, -gain, slack, request.spec.request_id

    def _compute_batching_gain(self, request: PendingRequest, alone: BatchCandidate) -> float:
        """The share of a step's seconds that a full batch saves each of its members."""
        degree = alone.degree
        batch = self._tick.find_batch_limit(request.spec, self._index, degree)
        together = self._tick.find_candidates(request.spec, self._index, batch).get(degree)
        return 1.0 - together.step_s / batch / alone.step_s if together is not None and alone.step_s else 0.0

    def _list_waiting(self, ordered: Sequence[PendingRequest]) -> Iterator[PendingRequest]:
        return (each for each in ordered if each.spec.request_id not in self.served)

    def _start(
        self,
        first: PendingRequest,
        begun: KindQueue,
        waiting: KindQueue,
        others: Iterable[PendingRequest] = (),
        beside: Iterable[PendingRequest] = (),
    ) -> bool:
        """Start a request on its workers or on idle ones, in one batch with all requests of its kind that may join it,
        and with `others` of other sizes where no more workers are idle. Of those `beside` it, which have begun, it
        takes the ones of its worker. They leave their queues."""
        alone = _find_narrowest(self._tick, first, self._index)
        if alone is None or self._picker.num_idle < (degree := alone.degree):
            return False
        held = (first.held_by,) if first.held_by is not None and degree == 1 else ()
        workers = held if self._picker.keep(held) else self._picker.take(degree)
        if workers is None:
            return False
        members = [first]
        (begun if first.spec.request_id in begun else waiting).pop(first.spec.request_id)
        near = (other for other in begun.values() if other.held_by == first.held_by)
        far = (other for other in begun.values() if other.held_by != first.held_by)
        self._tick.grow(members, chain(near, far), self._index, degree, strict=False)
        self._tick.grow(members, waiting.values(), self._index, degree, strict=True)
        mine = (other for other in beside if other.held_by == first.held_by)
        self._tick.mixed.mix(members, mine, self._index, degree, strict=False)
        if not self._picker.num_idle:
            self._tick.mixed.mix(members, others, self._index, degree, strict=True)
        candidate = self._tick.find_batch_candidates(members, self._index)[degree]
        slack_s = first.deadline_s - self._tick.expected_finish_s(first, candidate)
        reason = f"patchedserve: batch of {len(members)}, {slack_s:.2f} s of slack"
        made = self._tick.build_assignment(members, candidate, workers, reason)
        self.assignments.append(replace(made, goes_on=True))
        for member in members:
            self.served.add(member.spec.request_id)
            for queues in self._queues:
                queues[self._tick.kinds[member.spec.request_id]].pop(member.spec.request_id, None)
        return True

    def _join(self, request: PendingRequest) -> None:
        """Into the smallest active batch that stays in time with it, one of its kind before those of other sizes."""
        kind = self._tick.kinds[request.spec.request_id]
        active = (batch for batches in self._active.values() for batch in batches)
        for batch in sorted(active, key=lambda batch: (batch.kind != kind, batch.size)):
            if batch.kind == kind and batch.is_of_one_kind(self._tick):
                limit = self._tick.find_batch_limit(request.spec, self._index, len(batch.workers))
                has_room = batch.size < limit
            else:
                has_room = bool(batch.find_joining([request], self._tick, self._index))
            if has_room and self._is_schedulable(batch, request):
                batch.joining.append(request)
                self.served.add(request.spec.request_id)
                return

    def _is_schedulable(self, batch: RunningBatch, request: PendingRequest) -> bool:
        """Algorithm 1, lines 16 to 18: with one more, each request still ends in time that would without."""
        degree, now_s = len(batch.workers), self._tick.now_s
        before = self._tick.find_candidates_together(batch.specs, self._index, True).get(degree)
        after = self._tick.find_candidates_together([*batch.specs, request.spec], self._index, False).get(degree)
        if before is None or after is None:
            return False
        encoded_s = now_s + after.encode.seconds
        own_s = encoded_s + count_steps_left(request) * after.step_s + after.decode.seconds
        return own_s <= request.deadline_s and all(
            encoded_s + steps * after.step_s + after.decode.seconds <= member.deadline_s
            or now_s + steps * before.step_s + before.decode.seconds > member.deadline_s
            for member in batch.members
            for steps in (member.spec.num_inference_steps - member.steps_done,)
        )
