"""The common part of the step-level policies: the candidates for a batch in each pool at one moment, and segments as
assignments.

A segment is a run of denoising steps: E goes before the first one, C after the last. Stages that the primary lacks
go to auxiliaries, as in TridentServe (arXiv 2510.02838, section 6.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dispatch.assignment.assigning import AssignmentBuilder, StageEstimate
from dispatch.candidates.survey import find_route
from dispatch.candidates.work import Work
from dispatch.dispatcher import IlpDispatcher
from dispatch.options import DispatchOptions
from dispatch.policies.greedy.work import count_steps_left
from dispatch.workers.auxiliaries import Auxiliaries, AuxiliaryGroup
from dispatch.workers.memory_fit import MemoryCheck
from dispatch.workers.pools import WorkerSnapshot, take_snapshot
from tridentserve.errors import ProfileError
from tridentserve.plans import WorkerId
from tridentserve.protocols import Assignment, ClusterView, PendingRequest, StageTimes, WorkerView
from tridentserve.requests import BatchKey, RequestSpec, Shape
from tridentserve.scheduling.estimation.plan_estimates import stage_seconds
from tridentserve.stages import PlacementType, Stage

# A larger batch is worth it when the seconds per step and request fall below this share.
_WORTHWHILE = 0.98
# Requests of one batch kind can run in one batch.
BatchKind = tuple[str, Shape, int, BatchKey]


def find_batch_kind(spec: RequestSpec) -> BatchKind:
    """Model, shape, outputs and batch_key: what is equal in a batch. Steps may differ."""
    return spec.model, spec.shape, spec.num_outputs, spec.batch_key


class StepLevelDispatcher:
    """The base of the step-level policies."""

    def __init__(self, times: StageTimes, options: DispatchOptions | None = None) -> None:
        self._times = times
        self._options = options or DispatchOptions()
        self._max_batch = self._options.batch_limit
        self._feasibility = IlpDispatcher(times, self._options)
        self._memory = MemoryCheck(times, self._options)
        # The workers as last seen: most have not changed at the next tick.
        self._snapshot: WorkerSnapshot | None = None

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        """None when the placement could serve the request on an idle cluster, else why not."""
        return self._feasibility.can_ever_run(spec, workers)

    def _build_tick(self, view: ClusterView) -> StepTick:
        self._snapshot = take_snapshot(view.workers) if self._snapshot is None else self._snapshot.update(view.workers)
        return StepTick(self._times, self._options, self._memory, self._snapshot, view, self._max_batch)


@dataclass(frozen=True, slots=True)
class BatchCandidate:
    """A degree at which a batch can run in a pool."""

    degree: int
    """The degree of D."""
    primary: PlacementType
    """The placement type that the pool's workers have for the model."""
    encode_s: float
    """Seconds of E; 0 for members that have their condition."""
    step_s: float
    """Seconds of one step of D."""
    decode_s: float
    """Seconds of C."""
    encode_wait_s: float
    """Seconds that the auxiliary for E is still busy."""
    efficient: bool
    """True where the degree's efficiency reaches `DispatchOptions.min_efficiency`."""
    groups: Mapping[Stage, tuple[AuxiliaryGroup, ...]]
    """The auxiliaries for E and C, where these do not run with D."""
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
        self._max_batch = max_batch
        self._memory = memory
        self._auxiliaries = Auxiliaries(snapshot.all_pools, snapshot.node_of, memory, times, view.now_s)
        self._builder = AssignmentBuilder(self._auxiliaries, view.now_s)
        self._limits: dict[tuple[BatchKind, int, int], int] = {}
        self._candidates: dict[tuple[BatchKind, int, int, bool], dict[int, BatchCandidate]] = {}

    def find_candidates(
        self, spec: RequestSpec, pool: int, batch: int = 1, encoded: bool = False
    ) -> Mapping[int, BatchCandidate]:
        """The candidates by degree, ascending, in a pool for `batch` requests like `spec`. Empty where memory,
        auxiliaries or the profile do not cover it."""
        key = (find_batch_kind(spec), pool, batch, encoded)
        if key not in self._candidates:
            try:
                self._candidates[key] = self._survey_candidates(spec, pool, batch, encoded)
            except ProfileError:
                self._candidates[key] = {}
        return self._candidates[key]

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
        encode_free_s = route.free_at_s(Stage.ENCODE, spec.model, self._auxiliaries)
        return {
            degree: BatchCandidate(
                degree=degree,
                primary=route.primary,
                encode_s=0.0 if encoded else stage_seconds(self._times, spec, Stage.ENCODE, batch=batch),
                step_s=step_s[degree],
                decode_s=stage_seconds(self._times, spec, Stage.DECODE, batch=batch),
                encode_wait_s=0.0 if encode_free_s is None else max(0.0, encode_free_s - self.now_s),
                efficient=narrowest_s >= self._options.min_efficiency * degree * step_s[degree],
                groups=route.groups,
                apart=route.fitting.apart.get(degree, frozenset()),
            )
            for degree in degrees
        }

    def find_batch_candidates(self, members: Sequence[PendingRequest], pool: int) -> Mapping[int, BatchCandidate]:
        """`find_candidates` of requests of one kind together."""
        return self.find_candidates(members[0].spec, pool, len(members), all(member.encoded for member in members))

    def find_batch_limit(self, spec: RequestSpec, pool: int, degree: int) -> int:
        """The batch with the most steps per second, among those that fit: 1 where batching gains nothing."""
        key = (find_batch_kind(spec), pool, degree)
        if key not in self._limits:
            best, best_s = 1, float("inf")
            for batch in range(1, self._max_batch + 1):
                if (candidate := self.find_candidates(spec, pool, batch).get(degree)) is None:
                    break
                if candidate.step_s / batch < _WORTHWHILE * best_s:
                    best, best_s = batch, candidate.step_s / batch
            self._limits[key] = best
        return self._limits[key]

    def grow(
        self, members: list[PendingRequest], others: Sequence[PendingRequest], pool: int, degree: int, strict: bool
    ) -> None:
        """Let others of the same kind join in their order, up to the limit. `strict`: no request that would be in time
        alone may be late because of the batch."""
        limit = self.find_batch_limit(members[0].spec, pool, degree)
        for other in others:
            if len(members) >= limit:
                return
            if (
                find_batch_kind(other.spec) == find_batch_kind(members[0].spec)
                and count_steps_left(other)
                and count_steps_left(members[0])
            ):
                together = [*members, other]
                if not strict or self._delays_nobody(together, pool, degree):
                    members.append(other)

    def _delays_nobody(self, members: Sequence[PendingRequest], pool: int, degree: int) -> bool:
        if (candidate := self.find_batch_candidates(members, pool).get(degree)) is None:
            return False
        alone = {member.spec.request_id: self.find_batch_candidates([member], pool)[degree] for member in members}
        return all(
            self.expected_finish_s(member, candidate) <= member.deadline_s
            or self.expected_finish_s(member, alone[member.spec.request_id]) > member.deadline_s
            for member in members
        )

    def expected_finish_s(self, request: PendingRequest, candidate: BatchCandidate) -> float:
        """The time at which the request ends if it starts now and stays in a batch that runs this way."""
        return (
            self.now_s
            + candidate.encode_wait_s
            + candidate.encode_s
            + count_steps_left(request) * candidate.step_s
            + candidate.decode_s
        )

    def build_assignment(
        self,
        members: Sequence[PendingRequest],
        candidate: BatchCandidate,
        workers: tuple[WorkerId, ...],
        reason: str,
        num_steps: int | None = None,
    ) -> Assignment:
        """`num_steps` steps of each member (None, or too many: as the one with the fewest left has) on these workers.
        `candidate` is of the batch. `expected_finish_s` is the end of the segment, C included when D ends."""
        fewest = min(count_steps_left(member) for member in members)
        steps = fewest if num_steps is None else min(num_steps, fewest)
        encode = decode = None
        if any(not member.encoded for member in members):
            encode = StageEstimate(candidate.encode_s, len(workers), candidate.groups.get(Stage.ENCODE, ()))
        if steps == fewest:
            decode = StageEstimate(candidate.decode_s, 1, candidate.groups.get(Stage.DECODE, ()))
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
