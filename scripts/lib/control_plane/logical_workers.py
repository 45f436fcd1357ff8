"""Workers that take the profile's time without computing. Many of them live in one process, each with a channel of its
own, over which the engine calls them as it calls real ones."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from lib.control_plane.cluster import Truth
from tridentserve.engine.live.channels.channel import Channel
from tridentserve.engine.live.channels.opening import listen
from tridentserve.engine.live.messages import (
    ExpectedPeak,
    PlanNote,
    PlanReport,
    ProgressNote,
    WorkerConfig,
    WorkerReady,
)
from tridentserve.engine.live.worker.reporting.step_teller import PERIOD_S
from tridentserve.engine.live.worker_handle import WorkerHandle
from tridentserve.engine.simulated.workers.actual_times import ActualTimes
from tridentserve.plans import DispatchPlan, StageSpan, WorkerId
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.stages import Stage

HOST = "127.0.0.1"


@dataclass(slots=True)
class _LogicalPlan:
    """A plan on all its workers, which are in one process."""

    plan: DispatchPlan
    inputs: dict[str, GenerationInputs]
    is_watched: bool = False
    waiting: int = 0
    """Workers whose turn it is, and which wait for the others."""
    stop: bool = False
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the plan is to stop or to pause."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all workers have come."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerHost:
    """A process with many logical workers (an actor of Ray's)."""

    def __init__(self, truth: Truth, output_bytes: int) -> None:
        """Each image is a file of `output_bytes` bytes."""
        self._times: ActualTimes = truth.make_actual_times()
        self._output = bytes(output_bytes)
        self._runs: dict[int, _LogicalPlan] = {}
        self._listeners: list[object] = []

    async def start_worker(self, config: WorkerConfig) -> WorkerReady:
        """Take calls as the worker of this configuration."""
        order = asyncio.Lock()
        worker_id = config.spec.worker_id
        listener = await listen(HOST, lambda channel: LogicalWorkerCalls(self, worker_id, order, channel))
        self._listeners.append(listener)
        return WorkerReady(address=None, channel=listener.address, node_id=config.spec.node_id, max_denoising=None)

    async def read_usage(self) -> tuple[float, int]:
        """CPU seconds of this process so far, and its resident bytes."""
        return read_usage()

    def join(self, plan: DispatchPlan, inputs: dict[str, GenerationInputs]) -> _LogicalPlan:
        """One more worker has been given this plan."""
        run = self._runs.get(plan.plan_id)
        if run is None:
            run = self._runs[plan.plan_id] = _LogicalPlan(plan, inputs)
        return run

    def find(self, plan_id: int) -> _LogicalPlan | None:
        return self._runs.get(plan_id)

    async def run_to_end(self, run: _LogicalPlan, leads: bool, tell: Callable[[PlanNote], None]) -> PlanReport:
        """Take part in a plan, whose leader keeps the time; returns the report of one worker."""
        run.waiting += 1
        if run.waiting == run.plan.degree:
            run.begun.set()
        if not leads:
            await run.ended.wait()
            return PlanReport(run.plan.plan_id, "finished")
        await run.begun.wait()
        report = await self._take_time(run, tell)
        del self._runs[run.plan.plan_id]
        run.ended.set()
        return report

    async def _take_time(self, run: _LogicalPlan, tell: Callable[[PlanNote], None]) -> PlanReport:
        plan = run.plan
        specs = tuple(
            RequestSpec(name, plan.model, each.shape, each.num_inference_steps, each.num_outputs)
            for name, each in run.inputs.items()
        )
        demand = self._times.estimate_demand(plan, specs)
        spans: list[StageSpan] = []
        at_s, paused_after = time.time(), None
        for stage, stage_s, degree in zip(plan.stages, demand.seconds, demand.degrees, strict=True):
            if run.stop:
                return PlanReport(plan.plan_id, "stopped")
            steps = None
            if stage is Stage.DIFFUSE:
                steps = await self._take_steps(run, at_s, stage_s, tell)
                if run.stop:
                    return PlanReport(plan.plan_id, "stopped")
                paused_after = steps if steps < plan.num_steps else None
            else:
                await _sleep_until(at_s + stage_s)
            end_s = at_s + stage_s * (1 if steps is None else steps)
            spans.append(StageSpan(stage, at_s, end_s, plan.workers[:degree], steps))
            at_s = end_s
            if paused_after is not None:
                break
        made = Stage.DECODE in plan.stages and paused_after is None
        outputs = {spec.request_id: (self._output,) * spec.num_outputs for spec in specs} if made else {}
        return PlanReport(
            plan.plan_id,
            "finished",
            spans,
            {name: len(files) for name, files in outputs.items()},
            outputs,
            paused_after=paused_after,
        )

    async def _take_steps(
        self, run: _LogicalPlan, begin_s: float, step_s: float, tell: Callable[[PlanNote], None]
    ) -> int:
        """Let the steps of a plan pass; returns how many have, as it may be asked to pause or to stop."""
        plan, told = run.plan, 0
        end_s = begin_s + step_s * plan.num_steps
        while (now_s := time.time()) < end_s and not run.asked.is_set():
            until_s = min(end_s, now_s + PERIOD_S) if run.is_watched else end_s
            with suppress(TimeoutError):
                await asyncio.wait_for(run.asked.wait(), max(0.0, until_s - now_s))
            done = min(plan.num_steps - 1, int((time.time() - begin_s) / step_s))
            if run.is_watched and done > told:
                tell(ProgressNote(tuple(_list_steps(plan, told, done))))
                told = done
        if not run.asked.is_set():
            return plan.num_steps
        done = min(plan.num_steps, math.ceil((time.time() - begin_s) / step_s))
        await _sleep_until(begin_s + done * step_s)
        return done


class LogicalWorkerCalls:
    """The calls of the engine over one channel (see `WorkerCalls`)."""

    def __init__(self, host: WorkerHost, worker_id: WorkerId, order: asyncio.Lock, channel: Channel) -> None:
        self._host = host
        self._worker_id = worker_id
        self._order = order
        self._channel = channel
        self._tasks: set[asyncio.Task[None]] = set()

    def run_plan(
        self, plan: DispatchPlan, inputs: dict[str, GenerationInputs], expected: ExpectedPeak, is_watched: bool
    ) -> None:
        run = self._host.join(plan, inputs)
        run.is_watched |= is_watched
        task = asyncio.get_running_loop().create_task(self._run(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, run: _LogicalPlan) -> None:
        plan_id = run.plan.plan_id
        async with self._order:
            report = await self._host.run_to_end(
                run,
                run.plan.leader == self._worker_id,
                lambda note: self._channel.tell("take_note", plan_id, note),
            )
        self._channel.tell("take_report", report)

    def stop_plan(self, plan_id: int) -> None:
        if (run := self._host.find(plan_id)) is not None:
            run.stop = True
            run.asked.set()

    def pause_plan(self, plan_id: int) -> None:
        if (run := self._host.find(plan_id)) is not None:
            run.asked.set()

    def watch_plan(self, plan_id: int) -> None:
        if (run := self._host.find(plan_id)) is not None:
            run.is_watched = True

    def forget_request(self, request_id: str, last_plan_id: int, with_checkpoints: bool) -> None:
        """Nothing is kept."""

    async def unload_model(self, model: str) -> None:
        """Nothing is loaded."""

    def abort_groups_of(self, worker_id: WorkerId) -> None:
        """There are no groups."""

    def abort_groups_of_plan(self, plan_id: int) -> None:
        """There are no groups."""


class LogicalWorkerHandle(WorkerHandle):
    """The engine's handle of a logical worker. Its calls over the channel are those of a real one."""

    def __init__(self, host: Any, config: WorkerConfig) -> None:
        super().__init__(host)
        self._config = config

    def start(self) -> Any:
        return self.actor.start_worker.remote(self._config)

    def connect_peers(self, peers: object) -> Any:
        return _do_nothing()

    def watch(self) -> Any:
        return asyncio.get_running_loop().create_future()

    def set_placement(self, replicas: object, label: str) -> Any:
        return _do_nothing()

    def kill(self) -> None:
        """The process is shared; it ends with the benchmark."""


class LogicalSpawner:
    """A `Spawner` that puts the workers of a node into one process."""

    def __init__(self, hosts: list[Any]) -> None:
        self._hosts = itertools.cycle(hosts)
        self._of_node: dict[str, Any] = {}

    def spawn(self, config: WorkerConfig, index: int) -> WorkerHandle:
        node = config.spec.node_id
        if node not in self._of_node:
            self._of_node[node] = next(self._hosts)
        return LogicalWorkerHandle(self._of_node[node], config)

    async def prepare(self, index: int) -> None:
        """See `Spawner.prepare`. They need nothing."""


def read_usage() -> tuple[float, int]:
    """CPU seconds of this process so far, and its resident bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return time.process_time(), pages * os.sysconf("SC_PAGE_SIZE")


def start_hosts(count: int, truth: Truth, output_bytes: int) -> list[Any]:
    """Processes for logical workers."""
    actor: Any = ray.remote(WorkerHost).options(num_cpus=0, max_concurrency=10_000)
    return [actor.remote(truth, output_bytes) for _ in range(count)]


def _list_steps(plan: DispatchPlan, told: int, done: int) -> list[tuple[str, int]]:
    return [
        (member.request_id, member.steps[0] + step)
        for step in range(told + 1, done + 1)
        for member in plan.members
        if member.steps is not None
    ]


async def _sleep_until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - time.time()))


async def _do_nothing() -> None:
    pass
