"""Warms workers up: runs on them what they will be asked for, so that no request waits for what a worker does at the
first time only (to compile, to choose kernels, to get memory from the device).

A warm-up goes the way of requests, but the scheduler does not know of it: its plans are made here. Whatever fails in it
is logged, and the worker serves all the same.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from tridentserve.engine.live.messages import ExpectedPeak, PlanReport, WorkerConfig
from tridentserve.engine.live.plan_calls import PeakEstimator
from tridentserve.engine.live.warming.warm_up_runs import (
    RunSequence,
    WarmUpOrder,
    WarmUpPhase,
    WarmUpRun,
    list_first_phases,
    list_runs_again,
)
from tridentserve.engine.live.worker_handle import PlanItem, WorkerHandle
from tridentserve.errors import OutOfMemoryError, WorkerError
from tridentserve.plans import FIRST_WARM_UP_ID, DispatchPlan, WorkerId
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling.estimation.hot_groups import HotGroup

logger = logging.getLogger(__name__)

# A warm-up that takes longer is given up: a compiler may take minutes, but nothing is waited for without end.
_LONGEST_S = 1800.0

WarmUpProgress = dict[str, Any]
"""The state of a warm-up as `GET /health` tells it."""


class PlanTakers(Protocol):
    """The workers that are up (`WorkerFleet`)."""

    def list_configs(self) -> list[WorkerConfig]:
        """Their configurations."""

    def list_hot_groups(self) -> list[HotGroup]:
        """See `WorkerFleet`."""

    def list_handles(self, worker_ids: Collection[WorkerId]) -> list[WorkerHandle]:
        """See `WorkerFleet`."""

    def run_plan(
        self,
        worker_id: WorkerId,
        plan: DispatchPlan,
        inputs: Mapping[str, GenerationInputs],
        take: Callable[[PlanItem], None],
        peak: ExpectedPeak,
    ) -> bool:
        """See `WorkerFleet`."""

    def end_broken(self, worker_id: WorkerId) -> None:
        """See `WorkerFleet`."""


class Warmer:
    """Lives in the engine's event loop."""

    def __init__(self, orders: Sequence[WarmUpOrder], peaks: PeakEstimator) -> None:
        """`peaks`: the memory that plans are expected to take, so that workers refuse those that do not fit."""
        self._orders = orders
        self._peaks = peaks
        self._numbers = itertools.count(FIRST_WARM_UP_ID)
        self._spoiled: set[WorkerId] = set()
        """Workers that were lost in a warm-up, or whose device broke. Their next start is without one, as they might be
        lost each time."""
        self.progress: dict[WorkerId, WarmUpProgress] = {}
        """The warm-ups under way, by worker, of workers that came back."""

    async def warm_all(self, workers: PlanTakers, tell: Callable[[WarmUpProgress], object]) -> None:
        """Warm up workers that have just started. `tell` is called with the state before each run, and at the end."""
        configs = workers.list_configs()
        phases = list_first_phases(self._orders, *_list_holdings(configs), workers.list_hot_groups())
        if phases:
            await self._run_phases(workers, phases, tell)

    async def warm_again(self, workers: PlanTakers, worker_id: WorkerId) -> None:
        """Warm up a worker that has come back, while the others serve."""
        runs = list_runs_again(self._orders, *_list_holdings(workers.list_configs()), worker_id)
        if worker_id in self._spoiled:
            self._spoiled.discard(worker_id)
            logger.warning("%s is not warmed up: it was lost in a warm-up", worker_id)
        elif runs:
            try:
                await self._run_phases(workers, [(runs,)], lambda told: self.progress.update({worker_id: told}))
            finally:
                self.progress.pop(worker_id, None)

    async def _run_phases(
        self, workers: PlanTakers, phases: Sequence[WarmUpPhase], tell: Callable[[WarmUpProgress], object]
    ) -> None:
        began_s, done = time.monotonic(), 0
        total = sum(len(runs) for phase in phases for runs in phase)
        logger.info("warming up: %d runs", total)

        def note(**latest: Any) -> None:
            tell({"done": done, "total": total, **latest, "elapsed_s": round(time.monotonic() - began_s, 1)})

        async def run_all(runs: RunSequence) -> None:
            nonlocal done
            for run in runs:
                note(model=run.model, size=str(run.inputs.shape), workers=list(run.workers))
                await self._run(workers, run)
                done += 1

        try:
            async with asyncio.timeout(_LONGEST_S):
                for phase in phases:
                    await asyncio.gather(*map(run_all, phase))
        except TimeoutError:
            logger.warning("the warm-up is given up after %g s and %d of %d runs", _LONGEST_S, done, total)
        note()
        logger.info("warmed up in %.1f s", time.monotonic() - began_s)

    async def _run(self, workers: PlanTakers, run: WarmUpRun) -> None:
        plans = run.make_plans(f"warm-up-{next(self._numbers)}", next(self._numbers))
        for _ in plans[1:]:
            next(self._numbers)
        try:
            for plan in plans:
                await self._run_plan(workers, plan, run.inputs)
        except OutOfMemoryError as error:
            logger.info("%s is not warmed up at %s: %s", run.model, run.inputs.shape, error)
        except Exception as error:  # whatever it is, the workers serve without
            where = "+".join(run.workers)
            logger.warning("%s is not warmed up at %s on %s: %s", run.model, run.inputs.shape, where, error)
        finally:
            (request_id,) = plans[0].request_ids
            for handle in workers.list_handles(run.workers):
                handle.forget_request(request_id, plans[-1].plan_id, with_checkpoints=True)

    async def _run_plan(self, workers: PlanTakers, plan: DispatchPlan, inputs: GenerationInputs) -> None:
        """Raises `OutOfMemoryError` where a worker has no room for the plan, and `WorkerError` where it fails."""
        loop = asyncio.get_running_loop()
        (request_id,) = plan.request_ids
        spec = RequestSpec(request_id, plan.model, inputs.shape, inputs.num_inference_steps)
        answers: list[asyncio.Future[PlanReport]] = []
        for worker_id, peak in zip(plan.workers, self._peaks.estimate(plan, [spec]), strict=True):
            answers.append(loop.create_future())
            if not workers.run_plan(worker_id, plan, {request_id: inputs}, _make_taker(answers[-1]), peak):
                answers[-1].set_exception(WorkerError(f"{worker_id} is down"))
        with self._watch(workers, plan, answers):
            reports = await asyncio.gather(*answers, return_exceptions=True)
        for worker_id, report in zip(plan.workers, reports, strict=True):
            if isinstance(report, PlanReport) and report.is_device_broken:
                self._spoiled.add(worker_id)
                workers.end_broken(worker_id)
        for report in reports:
            if isinstance(report, BaseException):
                raise report
            if report.outcome == "failed":
                raise (OutOfMemoryError if report.code == OutOfMemoryError.code else WorkerError)(report.error)

    @contextmanager
    def _watch(
        self, workers: PlanTakers, plan: DispatchPlan, answers: Sequence[asyncio.Future[PlanReport]]
    ) -> Iterator[None]:
        """Meanwhile a worker that is lost answers with an error: nobody else watches it yet."""

        async def watch(worker_id: WorkerId, handle: WorkerHandle, answer: asyncio.Future[PlanReport]) -> None:
            why = await handle.wait_for_break()
            if not answer.done():
                self._spoiled.add(worker_id)
                answer.set_exception(WorkerError(f"{worker_id} is lost: {why}"))

        watches = [
            asyncio.ensure_future(watch(worker_id, handle, answer))
            for worker_id, answer in zip(plan.workers, answers, strict=True)
            for handle in workers.list_handles([worker_id])
        ]
        try:
            yield
        finally:
            for task in watches:
                task.cancel()


def _make_taker(answer: asyncio.Future[PlanReport]) -> Callable[[PlanItem], None]:
    def take(item: PlanItem) -> None:
        if answer.done():
            return
        if isinstance(item, PlanReport):
            answer.set_result(item)
        elif isinstance(item, WorkerError):
            answer.set_exception(item)

    return take


def _list_holdings(configs: Sequence[WorkerConfig]) -> tuple[dict[WorkerId, Any], dict[WorkerId, str]]:
    """The replicas and the node of each worker. Replicas of models that are gone do not count."""
    held = {
        config.spec.worker_id: frozenset(replica for replica in config.replicas if replica.model in config.sources)
        for config in configs
    }
    return held, {config.spec.worker_id: config.spec.node_id for config in configs}
