"""List scheduling: requests have their turn one by one, and each takes its workers if they are idle.

All baselines of TridentServe (arXiv 2510.02838, section 8.1) are this, and differ in the order of turns, in the degree,
in the cutting of the cluster into buckets, and in giving workers to stages or to whole pipelines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dispatch.candidates.work import KnownWork, Work
from dispatch.options import DispatchOptions
from dispatch.policies.greedy.bucket_view import BucketView, GreedyCandidate
from dispatch.policies.greedy.orders import IfItWaits, Order
from dispatch.policies.greedy.work import WorkTimes, choose_closest_degree, make_fresh_request
from dispatch.workers.memory_fit import MemoryCheck
from dispatch.workers.pools import Pool, WorkerSnapshot, take_snapshot
from tridentserve.errors import ProfileError
from tridentserve.plans import WorkerId
from tridentserve.protocols import Assignment, ClusterView, Decisions, PendingRequest, StageTimes, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.stages import VirtualReplica

# Types in the order of what is moved between workers: EDC (V0) least, D (V3) most (Table 3).
_COMMUNICATION = {replica.primary: rank for rank, replica in enumerate(VirtualReplica)}
# The bucket of all workers where there are no buckets.
_EVERYTHING = 1


class Level(Protocol):
    """Gives workers to stages in one tick: to whole pipelines (`pipeline_level`) or to each stage (`stage_level`)."""

    work: WorkTimes

    def find_candidates(self, request: PendingRequest, index: int, pool: Pool) -> list[GreedyCandidate] | str:
        """The candidates of the request in this pool, which has this index in its bucket, by degree; else a sentence
        why there are none. `ProfileError` for what is not profiled."""

    def assign(
        self, request: PendingRequest, candidate: GreedyCandidate, workers: tuple[WorkerId, ...], why: str
    ) -> Assignment:
        """The assignment with D on these workers."""


# Called with all pools of the cluster and the time.
LevelFactory = Callable[[StageTimes, MemoryCheck, DispatchOptions, Sequence[Pool], float], Level]
# Chooses the candidates that a request tries, in this order, by its deadline in seconds.
ByDeadline = Callable[[Sequence[GreedyCandidate], float], Sequence[GreedyCandidate]]


def prefer_closest_to_target(candidates: Sequence[GreedyCandidate], target: int) -> list[GreedyCandidate]:
    """The candidates at the degree closest to the target, and no others; least communication first."""
    degree = choose_closest_degree(sorted({candidate.degree for candidate in candidates}), target)
    return sorted((candidate for candidate in candidates if candidate.degree == degree), key=_by_communication)


class GreedyDispatcher:
    """Satisfies `tridentserve.protocols.Dispatcher`. What it keeps from tick to tick saves time only. It never
    preempts, batches or refuses."""

    def __init__(
        self,
        times: StageTimes,
        options: DispatchOptions,
        order: Order,
        level: LevelFactory,
        target: Callable[[RequestSpec], int] | None = None,
        buckets: Mapping[WorkerId, int] | None = None,
        by_deadline: ByDeadline | None = None,
    ) -> None:
        """`target`: the degree of D that a request is meant to have (None: the optimal one). `buckets`: the degree of
        each worker's bucket; in a bucket all requests have its degree. A worker that is in none, as it joined later,
        counts to the narrowest. None: no buckets. `by_deadline`: chooses in place of `prefer_closest_to_target`."""
        self._times = times
        self._options = options
        self._order = order
        self._level = level
        self._target = target
        self._by_deadline = by_deadline
        self._buckets = buckets or {}
        self._narrowest = min(self._buckets.values(), default=_EVERYTHING)
        self._memory = MemoryCheck(times, options)
        self._work = KnownWork()
        # The workers of each bucket as last seen: most have not changed at the next tick.
        self._snapshots: dict[int, WorkerSnapshot] = {}

    def decide(self, view: ClusterView) -> Decisions:
        """Assignments in the order of turns."""
        if not view.pending or not any(worker.idle for worker in view.workers):
            return Decisions()
        members = self._group_by_bucket(view.workers)
        known = self._snapshots
        self._snapshots = {
            bucket: known[bucket].update(workers) if bucket in known else take_snapshot(workers, self._memory.find_unit)
            for bucket, workers in members.items()
        }
        tick = self._build_tick(self._snapshots, view.now_s)
        assignments: list[Assignment] = []
        self._work.start_tick()
        for turn in self._order(view.pending, tick.level.work, view.now_s, self._work.find):
            work = self._work.find(turn.request)
            if work in tick.waiting:
                continue
            if not tick.any_idle:
                break
            made = tick.start(turn.request, work, turn.if_it_waits)
            if made is not None:
                assignments.append(made)
        return Decisions(tuple(assignments))

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        """None when some primary has the degree (and, at stage level, the memory) for this request, else why not."""
        snapshots = {
            bucket: take_snapshot(members, self._memory.find_unit)
            for bucket, members in self._group_by_bucket(workers).items()
        }
        why_not = self._build_tick(snapshots, now_s=0.0).explain(make_fresh_request(spec))
        return f"{spec.model} cannot make {spec.shape} here: {why_not}" if why_not is not None else None

    def _group_by_bucket(self, workers: Sequence[WorkerView]) -> dict[int, Sequence[WorkerView]]:
        """Narrowest first."""
        if not self._buckets:
            return {_EVERYTHING: workers}
        members: defaultdict[int, list[WorkerView]] = defaultdict(list)
        for worker in workers:
            members[self._buckets.get(worker.worker_id, self._narrowest)].append(worker)
        return {bucket: members[bucket] for bucket in sorted(members)}

    def _build_tick(self, snapshots: Mapping[int, WorkerSnapshot], now_s: float) -> _GreedyTick:
        pools = [pool for snapshot in snapshots.values() for pool in snapshot.all_pools]
        level = self._level(self._times, self._memory, self._options, pools, now_s)
        bucket_views = {bucket: BucketView(snapshot, now_s) for bucket, snapshot in snapshots.items() if snapshot.pools}
        return _GreedyTick(
            level, bucket_views, self._target or level.work.optimal_degree, bool(self._buckets), self._by_deadline
        )


class _GreedyTick:
    """The buckets at one moment; what requests of one kind could have is found once."""

    def __init__(
        self,
        level: Level,
        bucket_views: Mapping[int, BucketView],
        target: Callable[[RequestSpec], int],
        is_bucketed: bool,
        by_deadline: ByDeadline | None,
    ) -> None:
        self.level = level
        self._bucket_views = bucket_views
        self._target = target
        self._is_bucketed = is_bucketed
        self._by_deadline = by_deadline
        self._blocked: set[int] = set()
        self._known: dict[Work, _Routed | str] = {}
        self.waiting: set[Work] = set()
        """Work that has found no workers, where the deadline does not matter: none come free in a tick."""

    @property
    def any_idle(self) -> bool:
        return any(
            bucket_view.num_idle for bucket, bucket_view in self._bucket_views.items() if bucket not in self._blocked
        )

    def start(self, request: PendingRequest, work: Work, if_it_waits: IfItWaits) -> Assignment | None:
        """The request's assignment if its workers are idle. A request that could never start here stops no other."""
        routed = self._find_route(request, work)
        if isinstance(routed, str) or routed.bucket in self._blocked:
            return None
        bucket_view, wanted = self._bucket_views[routed.bucket], routed.candidates
        if self._by_deadline is not None:
            wanted = self._by_deadline(wanted, request.deadline_s)
        for candidate in wanted:
            workers = bucket_view.take(candidate, request.spec)
            if workers is not None:
                return self.level.assign(request, candidate, workers, f"{candidate.primary} degree {candidate.degree}")
        if if_it_waits is IfItWaits.BLOCK:
            self._blocked.add(routed.bucket)
        elif if_it_waits is IfItWaits.HOLD:
            bucket_view.hold(wanted)
        if self._by_deadline is None:
            self.waiting.add(work)
        return None

    def explain(self, request: PendingRequest) -> str | None:
        """The reason why the request could never start here; None when it could."""
        routed = self._find_route(request, Work.from_pending(request))
        return routed if isinstance(routed, str) else None

    def _find_route(self, request: PendingRequest, work: Work) -> _Routed | str:
        if work not in self._known:
            try:
                self._known[work] = self._route(request)
            except ProfileError as error:
                self._known[work] = str(error)
        return self._known[work]

    def _route(self, request: PendingRequest) -> _Routed | str:
        target, model = self._target(request.spec), request.spec.model
        if not self._bucket_views:
            return f"no worker holds the diffuse stage of {model}"
        bucket = choose_closest_degree(list(self._bucket_views), target)
        candidates: list[GreedyCandidate] = []
        obstacles: list[str] = []
        for index, pool in enumerate(self._bucket_views[bucket].pools):
            if model in pool.types:
                found = self.level.find_candidates(request, index, pool)
                if isinstance(found, str):
                    obstacles.append(found)
                else:
                    candidates += found
        if candidates:
            if self._by_deadline is None:
                candidates = prefer_closest_to_target(candidates, bucket if self._is_bucketed else target)
            return _Routed(bucket, candidates)
        return "; ".join(dict.fromkeys(obstacles)) or f"no worker holds the diffuse stage of {model}"


@dataclass(frozen=True, slots=True)
class _Routed:
    """The bucket that requests of one kind go to, and their candidates there: at least one, each of which fits an idle
    cluster. They are at the target, or at any degree where the deadline decides."""

    bucket: int
    candidates: Sequence[GreedyCandidate]


def _by_communication(candidate: GreedyCandidate) -> tuple[int, int]:
    return _COMMUNICATION[candidate.primary], candidate.pool
