"""Lone E and C legs: where each can go when it is due, which runs share a pass of E, and which C goes first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal

from tridentserve.plans import DispatchPlan, Replica, WorkerId
from tridentserve.protocols import StageTimes
from tridentserve.scheduling.estimation.plan_estimates import stage_seconds
from tridentserve.scheduling.runs.legs import Leg
from tridentserve.scheduling.runs.run import Run
from tridentserve.scheduling.workers.worker_pool import WorkerPool
from tridentserve.stages import Stage

DecodeOrder = Literal["urgent", "fifo", "shortest", "planned"]
_ENCODE = (Stage.ENCODE,)
# A late C goes before those that become due more than this number of its own runtimes later.
_LATE_RUNTIMES = 5.0


def can_run_as_planned(pool: WorkerPool, model: str, leg: Leg) -> bool:
    """True when a leg can run where it was planned: its workers are alive, and if it is a lone E or C, its worker has
    not been set aside, and is meant to hold that stage, or still does."""
    if not pool.all_alive(leg.workers):
        return False
    if not _is_lone(leg):
        return True
    if pool.any_aside(leg.workers):
        return False
    replica = Replica(model, leg.stages[0])
    return pool.holds(leg.workers[0], replica) or not pool.list_missing(leg.workers[0], [replica])


class OtherPlaces:
    """The other workers to which a lone E or C can go."""

    def __init__(
        self, pool: WorkerPool, times: StageTimes, find_shunned: Callable[[Iterable[str]], frozenset[WorkerId]]
    ):
        """`find_shunned`: the workers on which requests are not to be tried again, where others can run them."""
        self._pool = pool
        self._times = times
        self._find_shunned = find_shunned

    def find_leg(self, run: Run, now_s: float) -> Leg | None:
        """The next leg of a run, on workers that hold its stage, as many of them as hold it together; None where there
        are none, and for D, with its reserved workers."""
        leg, model = run.legs[0], run.spec.model
        if not _is_lone(leg):
            return None
        unit = self._times.unit(model, leg.stages[0])
        holders = self._pool.list_holders(Replica(model, leg.stages[0]), leg.workers[0], now_s)
        shunned = self._shun(run)
        for able in ([worker_id for worker_id in holders if worker_id not in shunned], holders):
            if units := self._pool.list_blocks(able, unit):
                return Leg(leg.stages, units[0])
        return None

    def list_idle(self, run: Run) -> Collection[WorkerId]:
        """The idle workers of the kind of those that were planned for the next leg of a run."""
        workers = run.legs[0].workers
        idle, shunned = self._pool.list_idle(self._pool.kind(workers[0])), self._shun(run).difference(workers)
        return [worker_id for worker_id in idle if worker_id not in shunned] if shunned else idle

    def _shun(self, run: Run) -> frozenset[WorkerId]:
        return self._find_shunned(request.spec.request_id for request in run.requests)


def _is_lone(leg: Leg) -> bool:
    return len(leg.stages) == 1 and leg.stages[0] is not Stage.DIFFUSE


class EncodeQueue:
    """Runs whose E waits for the E before it on its worker.

    No run waits for a batch to fill: when a worker has no E under way, all runs that wait for it go at once, up to the
    optimal batch of the profile. An E waits only for another E. If it waited for other plans of the worker too, a run
    could wait for itself, because workers are reserved for runs whose E is not done. Such an E queues at the worker.
    """

    def __init__(self, pool: WorkerPool, times: StageTimes, places: OtherPlaces, is_out: Callable[[int], bool]) -> None:
        """`is_out`: whether a plan has been given to workers and not been reported."""
        self._pool = pool
        self._times = times
        self._places = places
        self._is_out = is_out
        # With the reason to be logged, in the order in which they became due.
        self._waiting: dict[int, tuple[Run, str]] = {}
        # The E that each worker has been given last.
        self._latest: dict[WorkerId, int] = {}

    def accepts(self, run: Run) -> bool:
        """True when the next leg of a run is a lone E on auxiliaries."""
        leg = run.legs[0]
        return (
            leg.stages == _ENCODE
            and not set(leg.workers).intersection(run.assignment.diffuse)
            and not self._pool.holds(leg.workers[0], Replica(run.spec.model, Stage.DIFFUSE))
        )

    def add(self, run: Run, expected_s: float, reason: str) -> None:
        """The run waits. `expected_s`: expected seconds of its E."""
        self._waiting[run.run_id] = (run, reason)
        self._pool.promise(run.legs[0].workers, run.run_id, expected_s)

    def note_sent(self, plan: DispatchPlan) -> None:
        """A plan has been given to its workers."""
        if plan.stages == _ENCODE:
            self._latest.update(dict.fromkeys(plan.workers, plan.plan_id))

    def take_due(self, now_s: float) -> Iterator[tuple[list[Run], Leg | None, str]]:
        """Runs whose E can start now as one plan, where and why; None where no worker holds E any more. They must be
        sent before the next are asked for. Runs that no client waits for any more are dropped."""
        for run_id in list(self._waiting):
            if run_id not in self._waiting:
                continue  # it has joined one before it
            run, reason = self._waiting[run_id]
            if not run.requests:
                self._take([run])
                continue
            leg = run.legs[0]
            if not can_run_as_planned(self._pool, run.spec.model, leg):
                self._take([run])
                yield [run], self._places.find_leg(run, now_s), reason
            elif not any(self._is_busy(worker) for worker in leg.workers):
                together = self._choose_batch(run)
                self._take(together)
                yield together, leg, reason if len(together) == 1 else f"{len(together)} at once, {reason}"

    def _is_busy(self, worker: WorkerId) -> bool:
        latest = self._latest.get(worker)
        return latest is not None and self._is_out(latest)

    def _choose_batch(self, first: Run) -> list[Run]:
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


class DecodeQueue:
    """Runs whose D is done and whose C waits for an idle auxiliary.

    C's worker was named with D, so that the latents could be pushed there; by now another one of its kind may be free
    sooner, and something more urgent may wait. Urgent is what can still be in time, by deadline; what is late has a new
    deadline some of its runtimes later, so that it does not wait without end. In the order `planned`, the paper's, each
    C waits at the worker that was named, first in, first out (TridentServe, arXiv 2510.02838, sections 5.3 and 6.2).
    """

    def __init__(self, pool: WorkerPool, times: StageTimes, places: OtherPlaces, order: DecodeOrder) -> None:
        self._pool = pool
        self._times = times
        self._places = places
        self._order = order
        # With the reason to be logged, in the order in which they became due.
        self._waiting: dict[int, tuple[Run, str]] = {}

    def add(self, run: Run, reason: str) -> None:
        """The next leg of `run` is a lone C on an auxiliary."""
        self._waiting[run.run_id] = (run, reason)

    def take_due(self, now_s: float) -> Iterator[tuple[Run, Leg | None, str]]:
        """The runs whose C can start now, in their order, each with where and why; None where no worker holds C any
        more. Each must be sent before the next is asked for, as it takes its worker. Runs without
        requests are dropped."""
        for run_id in sorted(self._waiting, key=lambda run_id: self._rank_urgency(self._waiting[run_id][0], now_s)):
            run, reason = self._waiting[run_id]
            leg = run.legs[0]
            if not run.requests:
                del self._waiting[run_id]
            elif not can_run_as_planned(self._pool, run.spec.model, leg):
                del self._waiting[run_id]
                yield run, self._places.find_leg(run, now_s), reason
            elif (where := self._choose_leg(run, leg)) is not None:
                del self._waiting[run_id]
                yield run, where, reason

    def _choose_leg(self, run: Run, leg: Leg) -> Leg | None:
        """Workers of the leg's kind that are idle: its own, else as many others where that number is its optimal
        degree, else the fewest that hold C's weights together; None when there are none."""
        idle = self._places.list_idle(run)
        if not idle:
            return None
        spec = run.spec
        unit = self._times.unit(spec.model, Stage.DECODE)
        if leg.workers[0] in idle and (unit == 1 or all(worker in idle for worker in leg.workers)):
            return leg
        if self._order == "planned":
            return None
        if unit == len(leg.workers) == 1:
            return Leg(leg.stages, (min(idle),))
        wide = min(len(leg.workers), self._times.optimal_degree(spec.model, Stage.DECODE, spec.shape))
        for width in (wide, unit):
            if width > 1 and (blocks := self._pool.list_blocks(sorted(idle), width)):
                return Leg(leg.stages, blocks[0])
        return Leg(leg.stages, (min(idle),)) if unit == 1 else None

    def _rank_urgency(self, run: Run, now_s: float) -> tuple[float, int]:
        """Smaller goes first."""
        if not run.requests or self._order in ("fifo", "planned"):
            return 0.0, 0  # equals stay in the order in which they became due
        decode_s = stage_seconds(self._times, run.spec, Stage.DECODE)
        if self._order == "shortest":
            return decode_s, run.run_id
        deadline_s = min(request.deadline_s for request in run.requests)
        if now_s + decode_s > deadline_s:
            deadline_s += _LATE_RUNTIMES * (decode_s + run.num_steps * run.step_s)
        return deadline_s, run.run_id
