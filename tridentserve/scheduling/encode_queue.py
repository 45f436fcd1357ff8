"""Lone E legs: those that wait for the same worker share one forward pass (dynamic batching of E)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tridentserve.plans import DispatchPlan, Replica, WorkerId
from tridentserve.protocols import StageTimes
from tridentserve.scheduling.decode_queue import elsewhere, usable
from tridentserve.scheduling.runs import Leg, Run
from tridentserve.scheduling.worker_pool import WorkerPool
from tridentserve.stages import Stage

_ENCODE = (Stage.ENCODE,)


class EncodeQueue:
    """Runs whose E waits for the E before it on its worker.

    Nobody waits for a batch to fill: when a worker has no E under way, all that is here for it goes at once, up to the
    optimal batch of the profile. Only an E holds up another: who waited for what else a worker has been given might
    wait for itself, as workers are reserved for runs whose E is not done. Such an E queues there as all plans do.
    """

    def __init__(self, pool: WorkerPool, times: StageTimes, is_out: Callable[[int], bool]) -> None:
        """`is_out`: whether a plan has been given to workers and not been reported."""
        self._pool = pool
        self._times = times
        self._is_out = is_out
        # With the reason to be logged, in the order in which they became due.
        self._waiting: dict[int, tuple[Run, str]] = {}
        # The E that each worker has been given last.
        self._latest: dict[WorkerId, int] = {}

    def takes(self, run: Run) -> bool:
        """Whether the next leg of a run is a lone E on auxiliaries."""
        leg = run.legs[0]
        return (
            leg.stages == _ENCODE
            and not set(leg.workers).intersection(run.assignment.diffuse)
            and not self._pool.holds(leg.workers[0], Replica(run.spec.model, Stage.DIFFUSE))
        )

    def add(self, run: Run, expected_s: float, reason: str) -> None:
        """The run waits. `expected_s`: of its E."""
        self._waiting[run.run_id] = (run, reason)
        self._pool.promise(run.legs[0].workers, run.run_id, expected_s)

    def sent(self, plan: DispatchPlan) -> None:
        """A plan has been given to its workers."""
        if plan.stages == _ENCODE:
            self._latest.update(dict.fromkeys(plan.workers, plan.plan_id))

    def due(self, now_s: float) -> Iterator[tuple[list[Run], Leg | None, str]]:
        """Runs whose E can start now as one plan, where and why; None where no worker holds E any more. They must be
        sent before the next are asked for. Runs that nobody waits for any more are dropped."""
        for run_id in list(self._waiting):
            if run_id not in self._waiting:
                continue  # it has joined one before it
            run, reason = self._waiting[run_id]
            if not run.requests:
                self._take([run])
                continue
            leg, model = run.legs[0], run.spec.model
            if not usable(self._pool, model, leg):
                self._take([run])
                yield [run], elsewhere(self._pool, model, leg, now_s, self._times.unit(model, Stage.ENCODE)), reason
            elif not any(self._is_busy(worker) for worker in leg.workers):
                together = self._together(run)
                self._take(together)
                yield together, leg, reason if len(together) == 1 else f"{len(together)} at once, {reason}"

    def _is_busy(self, worker: WorkerId) -> bool:
        latest = self._latest.get(worker)
        return latest is not None and self._is_out(latest)

    def _together(self, first: Run) -> list[Run]:
        """The first run, and those behind it that its pass has room for: same model, same workers, of any size."""
        leg, spec = first.legs[0], first.spec
        limit = self._times.optimal_batch(spec.model, Stage.ENCODE, spec.shape, len(leg.workers))
        together, requests, widest = [first], len(first.requests), spec.num_outputs
        for run, _ in self._waiting.values() if not spec.alone else ():
            if run is first or not run.requests or run.legs[0] != leg or run.spec.model != spec.model or run.spec.alone:
                continue
            wider = max(widest, run.spec.num_outputs)
            if (requests + len(run.requests)) * wider <= limit:
                together.append(run)
                requests, widest = requests + len(run.requests), wider
        return together

    def _take(self, runs: Sequence[Run]) -> None:
        for run in runs:
            del self._waiting[run.run_id]
            if run.requests:
                self._pool.release(run.legs[0].workers, run.run_id)
