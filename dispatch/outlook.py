"""What one tick sees: pools, auxiliaries, and for each kind of work its candidates and what they are worth."""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.auxiliaries import Auxiliaries
from dispatch.candidates import Survey, Surveyor, Work
from dispatch.options import DispatchOptions
from dispatch.pools import primary_pools
from dispatch.rewards import Appraisal
from tridentserve.protocols import StageTimes, WorkerView


class Outlook:
    """The workers at `now_s`, grouped and surveyed. The pools and their order depend on what the workers hold, not on
    which of them are idle."""

    def __init__(
        self, times: StageTimes, options: DispatchOptions, workers: Sequence[WorkerView], now_s: float
    ) -> None:
        self.now_s = now_s
        self.pools = primary_pools(workers)
        self.auxiliaries = Auxiliaries(workers, times, options.handoff_reserve_bytes, now_s)
        self.idle = tuple(pool.idle_per_node for pool in self.pools)
        self._widest = [max(nodes) for nodes in self.idle]
        self._surveyor = Surveyor(times, options, self.pools, self.auxiliaries, now_s)
        self._rewards = options.rewards
        self._appraisals: dict[Work, Appraisal] = {}

    @property
    def any_idle(self) -> bool:
        """Whether some primary could start something now."""
        return any(self._widest)

    def survey(self, work: Work) -> Survey:
        """Where the work could run, now or later."""
        return self._surveyor.survey(work)

    def appraisal(self, work: Work) -> Appraisal:
        """What each slot is worth to requests with this work; made once."""
        if work not in self._appraisals:
            tokens = work.shape.tokens * work.num_outputs
            candidates = self.survey(work).candidates
            self._appraisals[work] = Appraisal(candidates, self._widest, tokens, self.now_s, self._rewards)
        return self._appraisals[work]
