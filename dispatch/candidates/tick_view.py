"""The view of one tick: pools, auxiliaries, and for each kind of work its candidates and what they are worth."""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.candidates.rewards import Appraisal
from dispatch.candidates.survey import Survey, Surveyor
from dispatch.candidates.work import Waiting, Work
from dispatch.options import DispatchOptions
from dispatch.workers.auxiliaries import Auxiliaries
from dispatch.workers.memory_fit import MemoryCheck
from dispatch.workers.pools import WorkerSnapshot, take_snapshot
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
    ) -> None:
        """A `WorkerSnapshot` of the workers and memory checks that were made before save time; they change nothing."""
        self.now_s = now_s
        memory = memory or MemoryCheck(times, options)
        self.snapshot = workers if isinstance(workers, WorkerSnapshot) else take_snapshot(workers, memory.find_unit)
        self.pools = self.snapshot.pools
        self.auxiliaries = Auxiliaries(self.snapshot.all_pools, memory, times, now_s)
        self.idle = tuple(pool.idle_per_node for pool in self.pools)
        self._widest = [max(nodes) for nodes in self.idle]
        self._surveyor = Surveyor(times, options, self.pools, self.auxiliaries, memory, now_s)
        self._rewards = options.rewards
        self._appraisals: dict[Work, Appraisal] = {}
        # The number by which optimal degrees may be divided; the dispatcher sets what `choose_narrowing` gives.
        self.narrowing = options.rewards.narrowing

    @property
    def any_idle(self) -> bool:
        """True when some primary could start something now."""
        return any(self._widest)

    def list_idle_models(self) -> frozenset[str]:
        """The models of which some primary is idle."""
        return frozenset(
            model for pool, widest in zip(self.pools, self._widest, strict=True) if widest for model in pool.types
        )

    def choose_narrowing(self, waiting: Waiting) -> int:
        """The number by which optimal degrees may be divided now: `options.rewards.narrowing` under pressure, else half
        of it. With little to do width is free and gives the shortest latency; with much to do narrow runs, which cost
        fewer GPU-seconds, make way for the requests that wait.

        The pressure is the time that all primaries together need for D of what waits, at the optimal degrees, over the
        mean slack of what can still be in time.
        """
        gpu_seconds, slack_s, in_time = 0.0, 0.0, 0
        for work, requests in waiting.items():
            efficient = [candidate for candidate in self.survey(work).candidates if candidate.efficient]
            best = max(efficient, key=lambda candidate: candidate.group.degree, default=None)
            if best is None:
                continue
            gpu_seconds += len(requests) * best.group.degree * best.diffuse_s
            for request in requests:
                slack = request.deadline_s - self.now_s - best.run_s
                if slack > 0:
                    slack_s += slack
                    in_time += 1
        primaries = sum(len(node) for pool in self.pools for node in pool.nodes)
        is_pressed = not in_time or gpu_seconds / primaries >= self._rewards.pressure * slack_s / in_time
        return self._rewards.narrowing if is_pressed else max(1, self._rewards.narrowing // 2)

    def survey(self, work: Work) -> Survey:
        """The ways in which the work could run, now or later."""
        return self._surveyor.survey(work)

    def appraise(self, work: Work) -> Appraisal:
        """The value of each group to requests with this work; computed once."""
        if work not in self._appraisals:
            tokens = work.shape.tokens * work.num_outputs
            candidates = self.survey(work).candidates
            self._appraisals[work] = Appraisal(
                candidates, self._widest, tokens, self.now_s, self._rewards, self.narrowing
            )
        return self._appraisals[work]
