"""The common part of the step-level policies: the candidates for a batch in each pool at one moment, and segments as
assignments.

A segment is a run of denoising steps: E goes before the first one, C after the last. Stages that the primary lacks
go to auxiliaries, as in TridentServe (arXiv 2510.02838, section 6.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from dispatch.assignment.assigning import AssignmentBuilder, StageEstimate
from dispatch.candidates.survey import find_route
from dispatch.candidates.work import Work
from dispatch.dispatcher import IlpDispatcher
from dispatch.options import DispatchOptions
from dispatch.policies.greedy.work import count_steps_left
from dispatch.policies.step_level.mixed_steps import MixedSteps
from dispatch.workers.auxiliaries import Auxiliaries
from dispatch.workers.memory_fit import MemoryCheck
from dispatch.workers.pools import WorkerSnapshot, take_snapshot
from tridentserve.errors import ProfileError
from tridentserve.plans import WorkerId
from tridentserve.protocols import Assignment, ClusterView, PendingRequest, RunningRequest, StageTimes, WorkerView
from tridentserve.requests import BatchKey, RequestSpec, Shape
from tridentserve.scheduling.estimation.plan_estimates import stage_seconds
from tridentserve.stages import PlacementType, Stage

# A larger batch is worth it when the seconds per step and request fall below this share.
_WORTHWHILE = 0.98
_is_encoded = attrgetter("encoded")
# Requests of one kind by their ids, in an order that the policy gives them.
KindQueue = dict[str, PendingRequest]


class StepLevelDispatcher:
    """The base of the step-level policies."""

    def __init__(self, times: StageTimes, options: DispatchOptions | None = None) -> None:
        self._times = times
        self._options = options or DispatchOptions()
        self.max_batch = self._options.batch_limit
        self._feasibility = IlpDispatcher(times, self._options)
        self._memory = MemoryCheck(times, self._options)
        # The workers as last seen: most have not changed at the next tick.
        self._snapshot: WorkerSnapshot | None = None

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        """None when the placement could serve the request on an idle cluster, else why not."""
        return self._feasibility.can_ever_run(spec, workers)

    def _build_tick(self, view: ClusterView) -> StepTick:
        self._snapshot = take_snapshot(view.workers) if self._snapshot is None else self._snapshot.update(view.workers)
        return StepTick(self._times, self._options, self._memory, self._snapshot, view, self.max_batch)


class BatchCandidate(NamedTuple):
    """A degree at which a batch can run in a pool."""

    degree: int
    """The degree of D."""
    primary: PlacementType
    """The placement type that the pool's workers have for the model."""
    encode: StageEstimate
    """E; 0 seconds for members that have their condition."""
    step_s: float
    """Seconds of one step of D."""
    decode: StageEstimate
    """C."""
    encode_wait_s: float
    """Seconds that the auxiliary for E is still busy."""
    efficient: bool
    """True where the degree's efficiency reaches `DispatchOptions.min_efficiency`."""
    apart: frozenset[Stage]
    """E and C that are plans of their own on the primary (`Assignment.apart`)."""


class StepTick:
    """One call of `decide`: the pools, and how long a batch takes at each degree where its memory fits."""

    def __init__(
        self,
        times: StageTimes,
        options: DispatchOptions,
        memory: MemoryCheck,
        snapshot: WorkerSnapshot,
        view: ClusterView,
        max_batch: int,
    ) -> None:
        self.now_s = view.now_s
        self.pools = snapshot.pools
        self._times = times
        self._options = options
        self.max_batch = max_batch
        self._memory = memory
        self._auxiliaries = Auxiliaries(snapshot.all_pools, snapshot.node_of, memory, times, view.now_s)
        self._builder = AssignmentBuilder(self._auxiliaries, view.now_s)
        numbers: dict[tuple[str, Shape, int, BatchKey], int] = {}
        self.kinds: dict[str, int] = {}
        """The number of each request's kind, by its id. Requests of one kind can run in one batch: model, shape,
        outputs and batch_key are equal. Steps may differ."""
        for spec in (*(each.spec for each in view.pending), *(each.spec for each in view.running)):
            equal = (spec.model, spec.shape, spec.num_outputs, spec.batch_key)
            self.kinds[spec.request_id] = numbers.setdefault(equal, len(numbers))
        self.mixed = MixedSteps(self, times, options)
        """Batches of several sizes."""
        self._limits: dict[tuple[int, int, int], int] = {}
        self._candidates: dict[tuple[int, int, int, bool], dict[int, BatchCandidate]] = {}

    def find_queues(self, requests: Iterable[PendingRequest]) -> Mapping[int, KindQueue]:
        """The requests of each kind, in their order."""
        queues: defaultdict[int, KindQueue] = defaultdict(dict)
        for request in requests:
            queues[self.kinds[request.spec.request_id]][request.spec.request_id] = request
        return queues

    def find_candidates(
        self, spec: RequestSpec, pool: int, batch: int = 1, encoded: bool = False
    ) -> Mapping[int, BatchCandidate]:
        """The candidates by degree, ascending, in a pool for `batch` requests like `spec`. Empty where memory,
        auxiliaries or the profile do not cover it."""
        key = (self.kinds[spec.request_id], pool, batch, encoded)
        if (candidates := self._candidates.get(key)) is None:
            try:
                candidates = self._survey_candidates(spec, pool, batch, encoded)
            except ProfileError:
                candidates = {}
            self._candidates[key] = candidates
        return candidates

    def _survey_candidates(self, spec: RequestSpec, index: int, batch: int, encoded: bool) -> dict[int, BatchCandidate]:
        pool = self.pools[index]
        if spec.model not in pool.types:
            return {}
        work = Work.from_spec(spec)._replace(needs_encode=not encoded, batch=batch)
        route = find_route(work, pool, self._memory, self._auxiliaries)
        if isinstance(route, str):
            return {}
        degrees = route.fitting.degrees
        step_s = {k: stage_seconds(self._times, spec, Stage.DIFFUSE, k, batch, num_steps=1) for k in degrees}
        narrowest_s = min(k * seconds for k, seconds in step_s.items())
        encode_s = 0.0 if encoded else stage_seconds(self._times, spec, Stage.ENCODE, batch=batch)
        encode_groups = route.groups.get(Stage.ENCODE, ())
        encode_free_s = route.free_at_s(Stage.ENCODE, spec.model, self._auxiliaries)
        decode_s = stage_seconds(self._times, spec, Stage.DECODE, batch=batch)
        decode = StageEstimate(decode_s, groups=route.groups.get(Stage.DECODE, ()))
        return {
            degree: BatchCandidate(
                degree=degree,
                primary=route.primary,
                encode=StageEstimate(encode_s, degree, encode_groups),
                step_s=step_s[degree],
                decode=decode,
                encode_wait_s=0.0 if encode_free_s is None else max(0.0, encode_free_s - self.now_s),
                efficient=narrowest_s >= self._options.min_efficiency * degree * step_s[degree],
                apart=route.fitting.apart.get(degree, frozenset()),
            )
            for degree in degrees
        }

    def find_batch_candidates(self, members: Sequence[PendingRequest], pool: int) -> Mapping[int, BatchCandidate]:
        """`find_candidates` of requests together."""
        return self.find_candidates_together([member.spec for member in members], pool, all(map(_is_encoded, members)))

    def find_candidates_together(
        self, specs: Sequence[RequestSpec], pool: int, encoded: bool
    ) -> Mapping[int, BatchCandidate]:
        """`find_candidates` of requests of one kind, or of several sizes where these may share steps."""
        if len({self.kinds[spec.request_id] for spec in specs}) == 1:
            return self.find_candidates(specs[0], pool, len(specs), encoded)
        return self.mixed.find_candidates(specs, pool, encoded)

    def find_batch_limit(self, spec: RequestSpec, pool: int, degree: int) -> int:
        """The batch with the most steps per second, among those that fit: 1 where batching gains nothing."""
        key = (self.kinds[spec.request_id], pool, degree)
        if key not in self._limits:
            best, best_s = 1, float("inf")
            for batch in range(1, self.max_batch + 1):
                if (candidate := self.find_candidates(spec, pool, batch).get(degree)) is None:
                    break
                if candidate.step_s / batch < _WORTHWHILE * best_s:
                    best, best_s = batch, candidate.step_s / batch
            self._limits[key] = best
        return self._limits[key]

    def grow(
        self, members: list[PendingRequest], others: Iterable[PendingRequest], pool: int, degree: int, strict: bool
    ) -> None:
        """Let others of the same kind join in their order, up to the limit. `strict`: no request that would be in time
        alone may be late because of the batch."""
        limit = self.find_batch_limit(members[0].spec, pool, degree)
        if limit <= len(members) or not count_steps_left(members[0]):
            return
        for other in others:
            if not count_steps_left(other):
                continue
            if strict:
                candidate = self.find_batch_candidates([*members, other], pool).get(degree)
                if candidate is None:
                    continue
                if not self.delays_nobody(members, candidate, pool):
                    if other.encoded or not members[0].encoded:
                        return  # any other would delay them as much, or more by its E
                    continue
                if not self.delays_nobody([other], candidate, pool):
                    continue
            members.append(other)
            if len(members) >= limit:
                return

    def delays_nobody(self, requests: Sequence[PendingRequest], candidate: BatchCandidate, pool: int) -> bool:
        """True when all that would be in time alone are in time in this batch."""
        return all(
            self.expected_finish_s(request, candidate) <= request.deadline_s
            or self.expected_finish_s(request, self.find_batch_candidates([request], pool)[candidate.degree])
            > request.deadline_s
            for request in requests
        )

    def expected_finish_s(self, request: PendingRequest, candidate: BatchCandidate) -> float:
        """The time at which the request ends if it starts now and stays in a batch that runs this way."""
        return (
            self.now_s
            + candidate.encode_wait_s
            + candidate.encode.seconds
            + count_steps_left(request) * candidate.step_s
            + candidate.decode.seconds
        )

    def build_takeover(
        self, running: Sequence[RunningRequest], joining: Sequence[PendingRequest], pool: int, reason: str
    ) -> Assignment | None:
        """A running batch together with those that join it, on its workers from its next step boundary on. None where
        that is not the same plan, as E goes to others, and where no memory is left for them."""
        workers = running[0].diffuse
        staying = [
            PendingRequest(each.spec, each.arrival_s, each.deadline_s, each.steps_done, True, workers[0])
            for each in running
        ]
        together = [*staying, *joining]
        candidate = self.find_batch_candidates(together, pool).get(len(workers))
        if candidate is None:
            return None
        encodes_elsewhere = candidate.encode.groups or Stage.ENCODE in candidate.apart
        if encodes_elsewhere and not all(map(_is_encoded, joining)):
            return None
        return replace(self.build_assignment(together, candidate, workers, reason), takes_over=True, goes_on=True)

    def build_assignment(
        self,
        members: Sequence[PendingRequest],
        candidate: BatchCandidate,
        workers: tuple[WorkerId, ...],
        reason: str,
        num_steps: int | None = None,
    ) -> Assignment:
        """`num_steps` steps of each member (None, or too many: as the one with the fewest left has; all of one that is
        not stopped between steps) on these workers.
        `candidate` is of the batch. `expected_finish_s` is the end of the segment, C included when D ends."""
        fewest = min([count_steps_left(member) for member in members])
        steps = fewest if num_steps is None or members[0].spec.whole else min(num_steps, fewest)
        encode = None if all(map(_is_encoded, members)) else candidate.encode
        decode = candidate.decode if steps == fewest else None
        left = None if steps == fewest else steps
        return self._builder.build(
            members,
            candidate.primary,
            workers,
            encode,
            steps * candidate.step_s,
            decode,
            reason,
            left,
            apart=candidate.apart,
        )
