"""Workers that share a queue: all of the cluster, or one bucket of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dispatch.workers.auxiliaries import AuxiliaryGroup
from dispatch.workers.idle_workers import IdleWorkers
from dispatch.workers.pools import Pool, WorkerSnapshot
from tridentserve.plans import WorkerId
from tridentserve.protocols import WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.stages import PlacementType, Stage


@dataclass(frozen=True, slots=True)
class GreedyCandidate:
    """A pool and a degree at which a request could run there."""

    pool: int
    """The pool's index in its bucket."""
    degree: int
    primary: PlacementType
    finish_s: float
    """The time at which the request would end if it started now."""
    groups: Mapping[Stage, tuple[AuxiliaryGroup, ...]] = field(default_factory=dict)
    """The auxiliaries for E and C, where these do not run with D."""
    apart: frozenset[Stage] = frozenset()
    """E and C that are plans of their own on the primary (`Assignment.apart`)."""


class BucketView:
    """The primaries of one queue, and which of them are still idle in this tick."""

    def __init__(self, snapshot: WorkerSnapshot, now_s: float) -> None:
        self._snapshot = snapshot
        self.pools: tuple[Pool, ...] = snapshot.pools
        self._now_s = now_s
        self._idle = [IdleWorkers(pool) for pool in self.pools]
        self._taken: dict[WorkerId, float] = {}
        self.num_idle = sum(sum(pool.idle_per_node) for pool in self.pools)

    def take(self, candidate: GreedyCandidate, spec: RequestSpec) -> tuple[WorkerId, ...] | None:
        """Idle workers of one node for this candidate, those that hold the weights already rather than others, and then
        those that hold the request's LoRAs; None when there are not enough together."""
        if candidate.degree > self.num_idle:
            return None
        idle = self._idle[candidate.pool]
        resident = idle.find_resident(spec.model, candidate.primary.stages)
        workers = idle.take(candidate.degree, resident, idle.find_holders(spec.loras))
        if workers is not None:
            self._keep(workers, candidate.finish_s)
        return workers

    def hold(self, candidates: Sequence[GreedyCandidate]) -> None:
        """Keep the workers that complete the first of these candidates from all other requests in this tick."""
        self._show_taken()
        first = min(
            candidates, key=lambda candidate: self.pools[candidate.pool].earliest_start_s(candidate.degree, self._now_s)
        )
        members = self.pools[first.pool].find_first_free(first.degree, self._now_s)
        self._keep([worker.worker_id for worker in members if worker.idle], first.finish_s)
        self._show_taken()
        self._idle = [IdleWorkers(pool) for pool in self.pools]

    def _keep(self, workers: Sequence[WorkerId], until_s: float) -> None:
        self.num_idle -= len(workers)
        self._taken.update(dict.fromkeys(workers, until_s))

    def _show_taken(self) -> None:
        """Let the pools show what this tick has taken as busy."""

        def busy(worker: WorkerView) -> WorkerView:
            return replace(worker, idle=False, free_at_s=self._taken[worker.worker_id])

        members = (worker for pool in self.pools for node in pool.nodes for worker in node)
        self._snapshot = self._snapshot.replace_views(
            {worker.worker_id: busy(worker) for worker in members if worker.idle and worker.worker_id in self._taken}
        )
        self.pools = self._snapshot.pools
