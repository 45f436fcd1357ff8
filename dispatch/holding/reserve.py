"""Workers that are kept free for requests with short deadlines.

Nothing stops a step of D, or C. Requests that have less slack than the steps of others take are late unless a worker is
free soon whenever they come. On many workers one always is; on a few, as many as these requests need are kept from work
that takes long, where it makes more requests late than it finishes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dispatch.candidates.arrivals import RecentArrivals
from dispatch.candidates.candidate import Candidate, PoolRule
from dispatch.candidates.survey import TickView
from dispatch.candidates.work import Work
from dispatch.workers.pools import Pool, WorkerSnapshot
from tridentserve.plans import Replica, WorkerId
from tridentserve.protocols import PendingRequest, WorkerView
from tridentserve.stages import Stage

# What is to be kept changes slowly: it is found anew after these seconds, or later (`RecentArrivals.is_old`).
_KEPT_S = 5.0


class _Wait(NamedTuple):
    """The wait for workers that a request could have had and still be in time."""

    slack_s: float
    """Seconds that it could have waited."""
    work_s: float
    """The GPU-seconds that it takes at `degree`."""
    model: str
    """Its model."""
    degree: int
    """The narrowest degree at which it can be in time."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """The workers of a pool that are kept for short requests."""

    count: int
    """The number of workers."""
    slacks_s: tuple[float, ...]
    """Seconds that each of the short requests that came lately could have waited; ascending."""
    span_s: float
    """The time in which they came."""
    model: str
    """The model of most of them, whose weights stay where room is short."""

    @property
    def median_slack_s(self) -> float:
        """A worker that is free within this time is as good as free."""
        return self.slacks_s[len(self.slacks_s) // 2]

    def admits(self, work: Work, candidate: Candidate, segment_s: float, is_resident: bool) -> bool:
        """True where a group finishes more requests, or parts of one, than it makes late. `is_resident`: the weights of
        all models are in memory at once."""
        if work.model != self.model and not is_resident:
            return False
        held_s = compute_held_seconds(work, candidate, segment_s)
        late = sum(max(0.0, held_s - slack_s) for slack_s in self.slacks_s) / self.span_s
        return late * candidate.run_s <= held_s


@dataclass(frozen=True, slots=True)
class _KeptWorkers:
    """The rule of a pool that kept workers are in."""

    reserve: Reserve
    segment_s: float
    is_resident: bool

    def admits(self, work: Work, candidate: Candidate) -> bool:
        return self.reserve.admits(work, candidate, self.segment_s, self.is_resident)


@dataclass(frozen=True, slots=True)
class _OtherWorkers:
    """The rule of a pool whose kept workers are in another one: no group waits for these."""

    widest: int
    """The most workers of a node that are not kept."""

    def admits(self, work: Work, candidate: Candidate) -> bool:
        return candidate.group.degree <= self.widest


class ReservedTick(NamedTuple):
    """The pools of a tick with some workers kept."""

    snapshot: WorkerSnapshot
    """The workers, with those that are kept as busy ones."""
    kept: tuple[Pool, ...]
    """Pools of those that are kept."""
    rules: Mapping[int, PoolRule]
    """The rules of some pools, by number: those of the snapshot first, then the kept ones."""


def compute_held_seconds(work: Work, candidate: Candidate, segment_s: float) -> float:
    """Seconds for which a group's workers cannot be had once it runs: a segment, or C where that is longer."""
    step_s = candidate.diffuse_s / max(1, work.num_steps)
    segment_s = candidate.diffuse_s if work.whole else max(step_s, min(segment_s, candidate.diffuse_s))
    return max(segment_s, candidate.decode_s) if candidate.decodes_there else segment_s


class Reserver:
    """Says how many workers of each pool to keep for requests like the latest arrivals."""

    def __init__(self, arrivals: RecentArrivals) -> None:
        self._arrivals = arrivals
        self._found: Mapping[int, Reserve] = {}
        self._found_s = -math.inf
        self._found_pools: list[tuple[frozenset[Replica], int]] = []

    def keep(
        self, snapshot: WorkerSnapshot, tick: TickView, waiting: Collection[PendingRequest], segment_s: float
    ) -> ReservedTick | None:
        """Split what should be kept from `snapshot`, of which `tick` is the view, where D runs in segments of these
        seconds. None where nothing is to be kept."""
        held: dict[WorkerId, WorkerView] = {}
        kept: list[Pool] = []
        rules: dict[int, PoolRule] = {}
        for index, reserve in self._find_reserves(tick, waiting, segment_s).items():
            pool = tick.pools[index]
            nodes = _choose_workers(pool, reserve, tick.now_s)
            widest = max(len(node) for node in pool.nodes)
            rules[index] = _OtherWorkers(widest if len(pool.nodes) > 1 else widest - reserve.count)
            if nodes:
                rules[len(tick.pools) + len(kept)] = _KeptWorkers(reserve, segment_s, pool.is_resident)
                kept.append(replace(pool, nodes=nodes))
                held |= {
                    worker.worker_id: replace(worker, idle=False, free_at_s=tick.now_s)
                    for node in nodes
                    for worker in node
                }
        return ReservedTick(snapshot.replace_views(held), tuple(kept), rules) if kept else None

    def _find_reserves(
        self, tick: TickView, waiting: Collection[PendingRequest], segment_s: float
    ) -> Mapping[int, Reserve]:
        """The reserves by pool."""
        pools = [(pool.replicas, sum(len(node) for node in pool.nodes)) for pool in tick.pools]
        if self._arrivals.is_old(self._found_s if pools == self._found_pools else -math.inf, _KEPT_S, tick.now_s):
            found = {index: self._find_reserve(tick, index, waiting, segment_s) for index in range(len(tick.pools))}
            self._found = {index: reserve for index, reserve in found.items() if reserve is not None}
            self._found_s, self._found_pools = tick.now_s, pools
        return self._found

    def _find_reserve(
        self, tick: TickView, index: int, waiting: Collection[PendingRequest], segment_s: float
    ) -> Reserve | None:
        """The workers of a pool to keep; None where short requests find one soon enough anyway."""
        pool = tick.pools[index]
        if pool.unit > 1:
            return None
        num_workers = sum(len(node) for node in pool.nodes)
        gpu_seconds = blocked = 0.0
        narrowest = 1
        waits: list[_Wait] = []
        for arrival in self._arrivals:
            candidates = [c for c in tick.survey(arrival.work).candidates if c.group.pool == index]
            if not candidates:
                continue
            narrowest = max(narrowest, candidates[0].group.degree)
            cheapest = min(candidates, key=lambda c: c.group.degree * c.run_s)
            work_s = cheapest.group.degree * cheapest.run_s
            gpu_seconds += work_s
            blocked += work_s * cheapest.group.degree * compute_held_seconds(arrival.work, cheapest, segment_s)
            # What could wait for longer at a wider degree is not short of time.
            slack_s = arrival.patience_s - min(c.run_s for c in candidates)
            if slack_s >= 0:
                first = min((c for c in candidates if c.run_s <= arrival.patience_s), key=lambda c: c.group.degree)
                waits.append(_Wait(slack_s, first.group.degree * first.run_s, arrival.work.model, first.group.degree))
        # What has waited for longer than all of these must find as many workers as it needs, too. A hopeless request
        # has its optimal degree alone; where the pool is one node, `_OtherWorkers` makes that one narrower.
        has_nodes = len(pool.nodes) > 1
        for work in {Work.from_spec(request.spec) for request in waiting}:
            mine = [c for c in tick.survey(work).candidates if c.group.pool == index]
            narrowest = max(narrowest, min((c.group.degree for c in mine), default=1))
            if has_nodes:
                narrowest = max(narrowest, max((c.group.degree for c in mine if c.efficient), default=1))
        # Where all are busy, this is the mean time until some worker is free: half of what runs, over their number.
        wait_s = blocked / (2 * gpu_seconds * num_workers) if gpu_seconds else 0.0
        short = sorted(wait for wait in waits if wait.slack_s < wait_s)
        if not short:
            return None
        span_s = self._arrivals.measure_span_s(tick.now_s)
        busy = sum(wait.work_s for wait in short) / span_s
        # As many as the short requests keep busy, and for bursts the square root of that.
        count = min(math.ceil(busy + math.sqrt(busy)), num_workers - narrowest)
        if not has_nodes:
            count = _limit_to_gain(count, num_workers, short, waits)
        model = Counter(wait.model for wait in short).most_common(1)[0][0]
        return Reserve(count, tuple(wait.slack_s for wait in short), span_s, model) if count > 0 else None


def _limit_to_gain(count: int, num_workers: int, short: Sequence[_Wait], waits: Sequence[_Wait]) -> int:
    """At most as many workers of a single node as make fewer requests late than there are short ones to save: groups
    wider than the workers that are left cannot be formed there. `waits`: of all that can be in time."""
    for kept in range(count, 0, -1):
        saved = sum(wait.degree <= num_workers - kept for wait in short)
        if sum(wait.degree > num_workers - kept for wait in waits) < saved:
            return kept
    return 0


def _choose_workers(pool: Pool, reserve: Reserve, now_s: float) -> tuple[tuple[WorkerView, ...], ...]:
    """Idle workers, by node, that are to be kept besides those that are free soon: from the fullest nodes, the ones
    with the weights first, and then the last of a node, so that aligned blocks stay whole."""
    soon_s = now_s + reserve.median_slack_s
    workers = [worker for node in pool.nodes for worker in node]
    missing = reserve.count - sum(not worker.idle and worker.free_at_s <= soon_s for worker in workers)
    replica = Replica(reserve.model, Stage.DIFFUSE)
    chosen: list[tuple[WorkerView, ...]] = []
    for node in sorted(pool.nodes, key=_count_idle):
        idle = [worker for worker in node if worker.idle]
        idle.sort(key=lambda worker: worker.resident is None or replica in worker.resident)
        if missing > 0 and idle:
            chosen.append(tuple(sorted(idle[-missing:], key=lambda worker: worker.worker_id)))
            missing -= len(chosen[-1])
    return tuple(chosen)


def _count_idle(node: Sequence[WorkerView]) -> int:
    return sum(worker.idle for worker in node)
