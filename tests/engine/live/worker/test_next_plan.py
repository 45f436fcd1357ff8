"""The next plan of a worker begins before the plan before it is reported, unless it waits for something."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch

from tests.device.recording import CPU
from tests.pipelines.models import make_inputs
from tests.support.waiting import PATIENCE_S
from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.messages import ExpectedPeak, PlanReport
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.worker.denoising import StepControl
from tridentserve.engine.live.worker.device_thread import DeviceThread
from tridentserve.engine.live.worker.executor import Execution
from tridentserve.engine.live.worker.plan_runner import PlanRunner
from tridentserve.engine.live.worker.reporting.plan_reports import PlanReporter
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.stages import Stage

INPUTS = make_inputs(steps=2)


class HeldExecutor:
    """Notes which plans begin. The second one ends when it may."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.may_end = threading.Event()

    def execute_plan(
        self, plan: DispatchPlan, inputs: Any, incoming: Any, control: StepControl, frugal: bool
    ) -> Execution:
        self.begun.append(plan.plan_id)
        control.on_begin()
        if plan.plan_id == 1:
            assert self.may_end.wait(PATIENCE_S)
        return Execution(outputs={"r": Parcel({"x": torch.zeros(1)})})


def make_runner(executor: HeldExecutor) -> tuple[PlanRunner, HandoffBuffer]:
    handoff = HandoffBuffer("w", {}, torch.zeros(1 << 16, dtype=torch.uint8), None)
    replicas = Mock(prepare=AsyncMock(), ahead_bytes=0)
    replicas.loras.take_news.return_value = None
    painter = Mock(finish=AsyncMock())
    reporter = PlanReporter("w", handoff, Mock())
    parts: list[Any] = [executor, replicas, Mock(), handoff, painter, Mock(), reporter]
    return PlanRunner("w", CPU, DeviceThread(), asyncio.Lock(), *parts), handoff


def start(runner: PlanRunner, number: int, member: PlanMember) -> asyncio.Future[PlanReport]:
    plan = DispatchPlan(number, "m", (Stage.ENCODE,), ("w",), (member,))
    reported = asyncio.get_running_loop().create_future()
    runner.start_plan(plan, {"r": INPUTS}, ExpectedPeak(0, 0), False, lambda note: None, reported.set_result)
    return reported


async def test_it_begins_before_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tridentserve.engine.live.worker.plan_runner._HEAD_START_S", PATIENCE_S)
    executor = HeldExecutor()
    runner, _ = make_runner(executor)
    first = start(runner, 0, PlanMember("r"))
    second = start(runner, 1, PlanMember("r", input_id=0, source="w"))
    assert (await first).outcome == "finished"
    assert executor.begun == [0, 1]
    executor.may_end.set()
    assert (await second).outcome == "finished"


async def test_a_plan_that_waits_for_another_worker_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tridentserve.engine.live.worker.plan_runner._HEAD_START_S", 1e9)
    executor = HeldExecutor()
    runner, handoff = make_runner(executor)
    arrives = asyncio.Event()

    async def fetch(key: object, source: str) -> Parcel:
        await arrives.wait()
        return Parcel({"x": torch.zeros(1)})

    monkeypatch.setattr(handoff, "fetch_parcel", fetch)
    first = start(runner, 0, PlanMember("r"))
    second = start(runner, 1, PlanMember("r", input_id=7, source="v"))
    assert (await first).outcome == "finished"
    assert executor.begun == [0]
    arrives.set()
    executor.may_end.set()
    assert (await second).outcome == "finished"


async def test_a_plan_that_does_not_begin_holds_the_report_up_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = HeldExecutor()
    runner, _ = make_runner(executor)
    comes = asyncio.Event()
    first = start(runner, 0, PlanMember("r"))
    second = start(runner, 1, PlanMember("r", input_id=0, source="w"))

    async def load(*_: object) -> bool:
        if executor.begun:
            await comes.wait()
        return False

    monkeypatch.setattr(runner._memory, "load", load)
    assert (await first).outcome == "finished"
    assert executor.begun == [0]
    comes.set()
    executor.may_end.set()
    assert (await second).outcome == "finished"
