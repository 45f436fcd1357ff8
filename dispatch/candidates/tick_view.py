"""The view of one tick: pools, auxiliaries, and for each kind of work its candidates and what they are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dispatch.candidates.survey import PoolRule, Survey, Surveyor
from dispatch.candidates.values import Appraisal
from dispatch.candidates.work import Waiting, Work
from dispatch.options import DispatchOptions
from dispatch.workers.auxiliaries import Auxiliaries
from dispatch.workers.memory_fit import MemoryCheck
from dispatch.workers.pools import Pool, WorkerSnapshot, take_snapshot
from tridentserve.protocols import StageTimes, WorkerView


class TickView:
    """The workers at `now_s`, grouped and surveyed. The pools and their order depend on what the workers hold, not on
    which of them are idle."""

    def __init__(
        self,
        times: StageTimes,
        options: DispatchOptions,
        workers: Sequence[WorkerView] | WorkerSnapshot,
        now_s: float,
        memory: MemoryCheck | None = None,
        kept: Sequence[Pool] = (),
        rules: Mapping[int, PoolRule] | None = None,
    ) -> None:
        """A `WorkerSnapshot` of the workers and memory checks that were made before save time; they change nothing."""
        self.now_s = now_s
        memory = memory or MemoryCheck(times, options)
        self.snapshot = workers if isinstance(workers, WorkerSnapshot) else take_snapshot(workers, memory.find_unit)
        self.pools = (*self.snapshot.pools, *kept)
        self.auxiliaries = Auxiliaries(self.snapshot.all_pools, memory, times, now_s)
        self.idle = tuple(pool.idle_per_node for pool in self.pools)
        self._widest = [max(nodes) for nodes in self.idle]
        self._surveyor = Surveyor(times, options, self.pools, self.auxiliaries, memory, now_s, rules or {})
        self._values = options.objective
        self._appraisals: dict[Work, Appraisal] = {}
        self._horizon_s = 1.0  # the dispatcher sets another, by what waits

    @property
    def any_idle(self) -> bool:
        """True when some primary could start something now."""
        return any(self._widest)

    def list_idle_models(self) -> frozenset[str]:
        """The models of which some primary is idle."""
        return frozenset(
            model for pool, widest in zip(self.pools, self._widest, strict=True) if widest for model in pool.types
        )

    def set_horizon(self, waiting: Waiting) -> None:
        """Urgency falls in proportion to the mean time from arrival to deadline of what waits."""
        patience_s = [max(0.0, r.deadline_s - r.arrival_s) for requests in waiting.values() for r in requests]
        mean_s = sum(patience_s) / len(patience_s) if patience_s else 1.0
        self._horizon_s = max(1e-6, self._values.horizon * mean_s)

    def survey(self, work: Work) -> Survey:
        """The ways in which the work could run, now or later."""
        return self._surveyor.survey(work)

    def appraise(self, work: Work) -> Appraisal:
        """The value of each group to requests with this work; computed once."""
        if work not in self._appraisals:
            candidates = self.survey(work).candidates
            self._appraisals[work] = Appraisal(candidates, self._widest, self.now_s, self._horizon_s, self._values)
        return self._appraisals[work]
