"""DiT-Serve: step-level batching, shortest remaining processing time first, rings sized by sequence length.

After "DiT-Serve", sections 3.2 (step-level batching), 3.3.2 (Brick Attention) and 3.4 (SRPTF), and its other orders.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dispatch.options import DispatchOptions
from dispatch.policies.greedy.placements import co_locate
from dispatch.policies.policy import Policy, PolicyContext, register_policy
from dispatch.policies.related.job_orders import JOB_ORDERS, JobOrder, compute_length
from dispatch.policies.step_level.dispatcher import KindQueue, StepLevelDispatcher, StepTick
from dispatch.policies.step_level.running_batches import RunningBatch, find_running_batches, let_join
from dispatch.policies.step_level.worker_picker import WorkerPicker
from profiler.cost_model import LARGEST_BATCH
from tridentserve.plans import WorkerId
from tridentserve.protocols import (
    Assignment,
    ClusterView,
    Decisions,
    PendingRequest,
    Preemption,
    StageTimes,
)


@dataclass(frozen=True, slots=True)
class _Victim:
    """A running batch that may have to make room."""

    batch: RunningBatch
    node: WorkerId
    """The first worker of its node."""
    measure: float
    """The least of its members', by the order of the policy."""


def _register(name: str, order: JobOrder) -> None:
    @register_policy(name, needs_load=True, default_max_batch=LARGEST_BATCH)
    def make_dit_serve(context: PolicyContext) -> Policy:
        """The whole pipeline is on every worker, as in the paper."""
        dispatcher = DitServe(context.times, context.options, order)
        return Policy(dispatcher, co_locate(context.workers, context.load), replanner_wanted=False)


for _end, _order in JOB_ORDERS.items():
    _register("dit-serve" if _end == "srptf" else f"dit-serve-{_end}", _order)


class DitServe(StepLevelDispatcher):
    """Requests are ordered by L = steps left x sequence length, or by another of `JOB_ORDERS`. Each has a ring whose
    size, a power of two, is proportional to its length; the longest request of its model that waits or runs has the
    widest one.

    A request that waits starts on idle workers together with others of its kind; else it joins a running batch of its
    kind at its next step boundary; else batches that come after it in the order are stopped for it, and nobody after it
    gets the workers of its ring meanwhile. When some of a batch have ended, the others go on. So the batch changes at
    the boundaries where the paper's would, and others cost nothing. Where idle workers are too few for a ring and
    nothing can be stopped, one step is run on a narrower ring.

    Requests of several sizes share a batch where `dispatch.pack_sizes` and `ring_sizes` name their model and the
    profile says that it pays: the ring of the batch is that of its longest member, and each shorter one has a part of
    it (Brick Attention). Shorter ones start with a longer one, or join it at a boundary.

    Left out: C split over workers (appendix A.2). A ring is never wider than the fastest degree. The largest batch is
    8, the paper's is 5 (4.2).
    """

    def __init__(self, times: StageTimes, options: DispatchOptions | None, order: JobOrder) -> None:
        super().__init__(times, options)
        self._order = order

    def decide(self, view: ClusterView) -> Decisions:
        """Starts, joins and displacements, the first of the order first."""
        tick = self._build_tick(view)
        longest = _find_longest(tick, view)
        waiting = sorted(view.pending, key=self._make_key)
        assignments: list[Assignment] = []
        preemptions: list[Preemption] = []
        for index, pool in enumerate(tick.pools):
            picker = WorkerPicker(pool)
            able = [request for request in waiting if tick.find_batch_candidates([request], index)]
            if not able:
                continue
            batches = find_running_batches(tick, view.running, picker)
            engine = _DitPool(tick, index, picker, longest, batches, self._order)
            engine.serve(able)
            assignments += engine.assignments
            preemptions += engine.preemptions
            served = {request_id for made in engine.assignments for request_id in made.request_ids}
            waiting = [request for request in waiting if request.spec.request_id not in served]
        return Decisions(assignments=tuple(assignments), preemptions=tuple(preemptions))

    def _make_key(self, request: PendingRequest) -> tuple[float, float, str]:
        return self._order.measure(request), request.arrival_s, request.spec.request_id


def _find_longest(tick: StepTick, view: ClusterView) -> dict[str, float]:
    """The longest sequence of each model that waits or runs."""
    longest: defaultdict[str, float] = defaultdict(float)
    specs = (*(each.spec for each in view.pending), *(each.spec for each in view.running))
    for spec in {tick.kinds[spec.request_id]: spec for spec in specs}.values():
        longest[spec.model] = max(longest[spec.model], compute_length(spec))
    return longest


class _DitPool:
    """One pool in one tick."""

    def __init__(
        self,
        tick: StepTick,
        index: int,
        picker: WorkerPicker,
        longest: Mapping[str, float],
        running: Iterable[RunningBatch],
        order: JobOrder,
    ) -> None:
        """`longest`: the longest sequence of each model. `running`: the batches of this pool."""
        self.assignments: list[Assignment] = []
        self.preemptions: list[Preemption] = []
        self._tick = tick
        self._index = index
        self._picker = picker
        self._longest = longest
        self._order = order
        self._rings: dict[tuple[int, bool], int] = {}
        self._of_kind: defaultdict[int | None, list[RunningBatch]] = defaultdict(list)
        self._victims: list[_Victim] = []
        self._in_node: defaultdict[WorkerId, list[_Victim]] = defaultdict(list)
        for batch in running:
            victim = _Victim(batch, picker.find_node(batch.workers[0]), min(map(order.measure, batch.members)))
            self._of_kind[batch.kind].append(batch)
            self._victims.append(victim)
            self._in_node[victim.node].append(victim)
        self._claimed: set[tuple[WorkerId, ...]] = set()

    def serve(self, waiting: Sequence[PendingRequest]) -> None:
        """All in their order, each with those of its kind that fit into one batch."""
        queues = self._tick.find_queues(waiting)
        for first in waiting:
            queue = queues[self._tick.kinds[first.spec.request_id]]
            if queue.pop(first.spec.request_id, None) is None:
                continue  # it has gone with one before it
            members = [first]
            ring = self._find_ring(first)
            self._tick.grow(members, queue.values(), self._index, ring, strict=False)
            alike = len(members)
            shorter = (each for each in self._list_waiting(waiting, queues) if self._find_ring(each) <= ring)
            self._tick.mixed.mix(members, shorter, self._index, ring, strict=False)
            started = self._start(members, ring)
            if not started:
                del members[alike:]  # they wait for workers, or a batch, of their own
                if joining := self._join(members) or self._mix_in(first, self._list_waiting(waiting, queues)):
                    self._leave_queues(joining, queues)
                    queue.clear()
                    continue
                started = not self._displace(members, ring) and self._start_narrower(members, ring)
            if started:
                self._leave_queues(members, queues)
            else:  # the others of its kind wait with it: what it waits for is for them too
                queue.clear()
        joins = let_join((each.batch for each in self._victims), self._tick, self._index, "dit-serve")
        self.assignments += joins.assignments
        self.preemptions += joins.preemptions

    def _find_ring(self, request: PendingRequest) -> int:
        key = (self._tick.kinds[request.spec.request_id], request.encoded)
        if key not in self._rings:
            self._rings[key] = self._choose_ring(request)
        return self._rings[key]

    def _choose_ring(self, request: PendingRequest) -> int:
        """Figure 6 and its algorithm: 2^ceil(log2(length / longest)) of the widest ring, on degrees that fit."""
        candidates = self._tick.find_batch_candidates([request], self._index)
        share = 2.0 ** math.ceil(math.log2(compute_length(request.spec) / self._longest[request.spec.model]))
        fastest = min(candidates, key=lambda degree: (candidates[degree].step_s, degree))
        widest = min(max(1, int(self._tick.pools[self._index].largest_node * share)), fastest)
        return max((degree for degree in candidates if degree <= widest), default=min(candidates))

    def _start(self, members: Sequence[PendingRequest], ring: int, num_steps: int | None = None) -> bool:
        candidate = self._tick.find_batch_candidates(members, self._index).get(ring)
        if candidate is None or (workers := self._picker.take(ring)) is None:
            return False
        measure = f"{self._order.measure(members[0]):.0f} {self._order.unit}"
        reason = f"dit-serve: batch of {len(members)} on a ring of {ring}, {measure}"
        made = self._tick.build_assignment(members, candidate, workers, reason, num_steps)
        self.assignments.append(replace(made, goes_on=num_steps is None))
        return True

    def _start_narrower(self, members: Sequence[PendingRequest], ring: int) -> bool:
        candidates = self._tick.find_batch_candidates(members, self._index)
        return any(self._start(members, degree, 1) for degree in sorted(candidates, reverse=True) if degree < ring)

    def _join(self, members: Sequence[PendingRequest]) -> Sequence[PendingRequest]:
        """Step-level batching (section 3.2): as many as there is room for into a batch of their kind. Returns those
        that join."""
        spec = members[0].spec
        for batch in self._of_kind[self._tick.kinds[spec.request_id]]:
            limit = self._tick.find_batch_limit(spec, self._index, len(batch.workers))
            if batch.size < limit and batch.workers not in self._claimed and batch.is_of_one_kind(self._tick):
                joining = members[: limit - batch.size]
                batch.joining += joining
                return joining
        return ()

    def _leave_queues(self, served: Iterable[PendingRequest], queues: Mapping[int, KindQueue]) -> None:
        for request in served:
            queues[self._tick.kinds[request.spec.request_id]].pop(request.spec.request_id, None)

    def _list_waiting(
        self, waiting: Sequence[PendingRequest], queues: Mapping[int, KindQueue]
    ) -> Iterator[PendingRequest]:
        """Those that wait in their queue, in their order."""
        return (each for each in waiting if each.spec.request_id in queues[self._tick.kinds[each.spec.request_id]])

    def _mix_in(self, first: PendingRequest, others: Iterable[PendingRequest]) -> list[PendingRequest]:
        """Brick Attention (section 3.3.2): into a batch of another size whose ring is at least as wide, with others
        where it pays with these. Returns those that join."""
        waiting = [first, *(each for each in others if each is not first)]
        for victim in self._victims:
            batch = victim.batch
            degree = len(batch.workers)
            if batch.workers in self._claimed or degree < self._find_ring(first):
                continue
            able = (each for each in waiting if self._find_ring(each) <= degree)
            if joining := list(batch.find_joining(able, self._tick, self._index)):
                batch.joining += joining
                return joining
        return []

    def _displace(self, members: Sequence[PendingRequest], ring: int) -> bool:
        """Batches of one node that come after them, the last first, until the ring has room with the idle workers,
        which nobody after them gets: batches end their steps at different times, and the ring would never be whole.
        Those that stop already come first, once for each ring."""
        measure = self._order.measure(members[0])
        tried: set[WorkerId] = set()
        for victim in self._victims:
            if victim.node in tried or not self._may_stop(victim, measure):
                continue
            tried.add(victim.node)
            room = self._picker.count_idle_in_node(victim.node)
            victims = [each for each in self._in_node[victim.node] if self._may_stop(each, measure)]
            chosen: list[RunningBatch] = []
            idle = ring
            for each in sorted(victims, key=lambda each: (not each.batch.stops, -each.measure)):
                if room < ring:
                    chosen.append(each.batch)
                    room += len(each.batch.workers)
                    idle -= len(each.batch.workers)
            if room >= ring:
                self._picker.set_aside(victim.node, max(0, idle))
                for batch in chosen:
                    self._claimed.add(batch.workers)
                    self.preemptions += batch.stop(f"dit-serve: {members[0].spec.request_id} comes first")
                return True
        return False

    def _may_stop(self, victim: _Victim, measure: float) -> bool:
        """True when a ring for a request of this measure may have the workers."""
        batch = victim.batch
        return (victim.measure > measure or batch.stops) and not batch.joining and batch.workers not in self._claimed
