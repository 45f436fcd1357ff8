"""Warms workers up: runs on them what they will be asked for, so that no request waits for what a worker does at the
first time only (to compile, to choose kernels, to get memory from the device).

A warm-up goes the way of requests, but the scheduler does not decide it: its plans are made here. Of those for a model
that has been added the scheduler hears, so that it gives these workers nothing else where others are idle. Whatever
fails in a warm-up is logged, and the worker serves all the same.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from tridentserve.engine.live.messages import ExpectedPeak, PlanReport, WorkerConfig
from tridentserve.engine.live.plan_calls import PeakEstimator
from tridentserve.engine.live.warming.beside_service import BesideService, PostEvent, WarmUpStop
from tridentserve.engine.live.warming.warm_up_runs import (
    RunSequence,
    WarmUpOrder,
    WarmUpPhase,
    WarmUpRun,
    join_on_nodes,
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
        self._orders = {order.model: order for order in orders}
        self.peaks = peaks
        self._numbers = itertools.count(FIRST_WARM_UP_ID)
        self._spoiled: set[WorkerId] = set()
        """Workers that were lost in a warm-up, or whose device broke. Their next start is without one, as they might be
        lost each time."""
        self.progress: dict[WorkerId, WarmUpProgress] = {}
        """The warm-ups under way, by worker, of workers that came back."""
        self.model_progress: dict[str, WarmUpProgress] = {}
        """The warm-ups under way, by model, of models that have been added."""
        self._stops: dict[str, WarmUpStop] = {}
        """One for each of these models."""

    async def warm_all(self, workers: PlanTakers, tell: Callable[[WarmUpProgress], object]) -> None:
        """Warm up workers that have just started. `tell` is called with the state before each run, and at the end."""
        configs = workers.list_configs()
        orders = list(self._orders.values())
        phases = list_first_phases(orders, *_list_holdings(configs), workers.list_hot_groups())
        if phases:
            await self._run_phases(workers, phases, tell)

    async def warm_again(self, workers: PlanTakers, worker_id: WorkerId) -> None:
        """Warm up a worker that has come back, while the others serve."""
        runs = list_runs_again(list(self._orders.values()), *_list_holdings(workers.list_configs()), worker_id)
        if worker_id in self._spoiled:
            self._spoiled.discard(worker_id)
            logger.warning("%s is not warmed up: it was lost in a warm-up", worker_id)
        elif runs:
            try:
                await self._run_phases(workers, [(runs,)], lambda told: self.progress.update({worker_id: told}))
            finally:
                self.progress.pop(worker_id, None)

    async def warm_model(self, workers: PlanTakers, order: WarmUpOrder, post: PostEvent) -> None:
        """Warm up the workers for a model that has been added, while they serve: one worker of each node at a time, and
        each run when those that take part have no plan. `post` gives the scheduler events. Returns before the end after
        `ask_to_stop_model` and `drop_model`."""
        model = order.model
        self._orders[model] = order
        held, nodes = _list_holdings(workers.list_configs())
        phases = list_first_phases([order], held, nodes, workers.list_hot_groups())
        phases = [join_on_nodes(phase, nodes) for phase in phases]
        stop = self._stops[model] = WarmUpStop()
        try:
            if phases:
                beside = BesideService(post, stop)
                await self._run_phases(workers, phases, lambda told: self.model_progress.update({model: told}), beside)
        finally:
            self.model_progress.pop(model, None)
            del self._stops[model]
            stop.ended.set()

    def ask_to_stop_model(self, model: str) -> None:
        """End the warm-up of a model that has been added, if there is one, after the run that is under way."""
        if (stop := self._stops.get(model)) is not None:
            stop.asked.set()

    async def drop_model(self, model: str) -> None:
        """End it, and wait until nothing of it runs. No worker is warmed up for the model any more."""
        self._orders.pop(model, None)
        if (stop := self._stops.get(model)) is not None:
            stop.asked.set()
            await stop.ended.wait()

    async def _run_phases(
        self,
        workers: PlanTakers,
        phases: Sequence[WarmUpPhase],
        tell: Callable[[WarmUpProgress], object],
        beside: BesideService | None = None,
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
                if beside is not None and not await beside.wait_for_turn(workers.list_handles(run.workers)):
                    return
                await self._run(workers, run, beside)
                done += 1

        try:
            async with asyncio.timeout(_LONGEST_S):
                for phase in phases:
                    await asyncio.gather(*map(run_all, phase))
        except TimeoutError:
            logger.warning("the warm-up is given up after %g s and %d of %d runs", _LONGEST_S, done, total)
        note()
        logger.info("warmed up in %.1f s", time.monotonic() - began_s)

    async def _run(self, workers: PlanTakers, run: WarmUpRun, beside: BesideService | None) -> None:
        plans = run.make_plans(f"warm-up-{next(self._numbers)}", next(self._numbers))
        for _ in plans[1:]:
            next(self._numbers)
        try:
            for plan in plans:
                with beside.announce(plan) if beside is not None else nullcontext():
                    await self._run_plan(workers, plan, run.inputs, beside)
        except OutOfMemoryError as error:
            logger.info("%s is not warmed up at %s: %s", run.model, run.inputs.shape, error)
        except Exception as error:  # whatever it is, the workers serve without
            where = "+".join(run.workers)
            logger.warning("%s is not warmed up at %s on %s: %s", run.model, run.inputs.shape, where, error)
        finally:
            (request_id,) = plans[0].request_ids
            for handle in workers.list_handles(run.workers):
                handle.forget_request(request_id, plans[-1].plan_id, with_checkpoints=True)

    async def _run_plan(
        self, workers: PlanTakers, plan: DispatchPlan, inputs: GenerationInputs, beside: BesideService | None
    ) -> None:
        """Raises `OutOfMemoryError` where a worker has no room for the plan, and `WorkerError` where it fails."""
        loop = asyncio.get_running_loop()
        (request_id,) = plan.request_ids
        spec = RequestSpec(request_id, plan.model, inputs.shape, inputs.num_inference_steps)
        answers: list[asyncio.Future[PlanReport]] = []
        for worker_id, peak in zip(plan.workers, self.peaks.estimate(plan, [spec]), strict=True):
            answers.append(loop.create_future())
            take = _make_taker(answers[-1])
            if beside is not None:
                take = beside.listen(worker_id, take)
            if not workers.run_plan(worker_id, plan, {request_id: inputs}, take, peak):
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
