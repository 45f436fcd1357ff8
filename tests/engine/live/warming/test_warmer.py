"""Warm-ups over workers that record their plans: what fails is no reason not to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import pytest

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.messages import ExpectedPeak, PlanReport, WorkerConfig
from tridentserve.engine.live.plan_calls import PeakEstimator
from tridentserve.engine.live.warming.warm_up_runs import WarmUpOrder
from tridentserve.engine.live.warming.warmer import Warmer, WarmUpProgress
from tridentserve.engine.live.worker_handle import PlanItem, WorkerHandle
from tridentserve.plans import DispatchPlan, Replica, WorkerId
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.scheduling.estimation.hot_groups import HotGroup
from tridentserve.stages import Stage

ORDER = WarmUpOrder(
    "m", tuple(GenerationInputs("a lighthouse", Shape(side, side), 2, 1.0, 0) for side in (64, 512)), (1, 2), True
)


class FakeHandle:
    """A connection that breaks when it is told to."""

    def __init__(self) -> None:
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.idle = asyncio.Event()
        self.idle.set()
        self.forgotten: list[tuple[str, int]] = []

    async def wait_for_break(self) -> str:
        return await asyncio.shield(self.broken)

    async def wait_until_idle(self) -> None:
        await self.idle.wait()

    def forget_request(self, request_id: str, last_plan_id: int, with_checkpoints: bool) -> None:
        assert with_checkpoints
        self.forgotten.append((request_id, last_plan_id))


class FakeWorkers:
    """Workers that hold all stages of one model. `answer` makes the report of a plan on a worker; None: nothing ever
    comes."""

    def __init__(self, *worker_ids: WorkerId) -> None:
        self.handles = {worker_id: FakeHandle() for worker_id in worker_ids}
        self.plans: list[tuple[WorkerId, DispatchPlan]] = []
        self.ended: list[WorkerId] = []
        self.answer: Callable[[WorkerId, DispatchPlan], PlanReport | None] = lambda worker_id, plan: PlanReport(
            plan.plan_id, "finished"
        )

    def list_configs(self) -> list[WorkerConfig]:
        replicas = frozenset(Replica("m", stage) for stage in Stage)
        source: Any = None
        return [
            WorkerConfig(WorkerSpec(worker_id, "n", 1), 0, "", replicas, {"m": source}, {}, "", 0)
            for worker_id in self.handles
        ]

    def list_hot_groups(self) -> list[HotGroup]:
        return [HotGroup("pair", tuple(self.handles))] if len(self.handles) == 2 else []

    def list_handles(self, worker_ids: Collection[WorkerId]) -> list[WorkerHandle]:
        return [cast(WorkerHandle, self.handles[worker_id]) for worker_id in worker_ids]

    def run_plan(
        self,
        worker_id: WorkerId,
        plan: DispatchPlan,
        inputs: Mapping[str, GenerationInputs],
        take: Callable[[PlanItem], None],
        peak: ExpectedPeak,
    ) -> bool:
        self.plans.append((worker_id, plan))
        report = self.answer(worker_id, plan)
        if report is not None:
            asyncio.get_running_loop().call_soon(take, report)
        return True

    def end_broken(self, worker_id: WorkerId) -> None:
        self.ended.append(worker_id)


def make_warmer(*orders: WarmUpOrder) -> Warmer:
    return Warmer(orders, PeakEstimator(None))


async def test_all_workers_run_all_sizes_and_keep_nothing(caplog: pytest.LogCaptureFixture) -> None:
    workers, told = FakeWorkers("w0", "w1"), list[WarmUpProgress]()
    with caplog.at_level("INFO"):
        await make_warmer(ORDER).warm_all(workers, told.append)
    ran = [(worker_id, plan.workers, len(plan.stages)) for worker_id, plan in workers.plans]
    alone = [(worker_id, (worker_id,), 3) for worker_id in ("w0", "w0", "w1", "w1")]
    assert ran == [*alone, *[("w0", ("w0", "w1"), 3), ("w1", ("w0", "w1"), 3)] * 2]
    assert len({plan.plan_id for _, plan in workers.plans}) == 6
    for worker_id, handle in workers.handles.items():
        ids = [(plan.request_ids[0], plan.plan_id) for name, plan in workers.plans if name == worker_id]
        assert handle.forgotten == ids
    assert [progress["done"] for progress in told] == list(range(7))
    assert {progress["total"] for progress in told} == {6}
    assert (told[0]["model"], told[0]["size"], told[0]["workers"]) == ("m", "64x64", ["w0"])
    assert "warmed up in" in caplog.text


async def test_nothing_is_run_without_an_order() -> None:
    workers, warmer = FakeWorkers("w0", "w1"), make_warmer()
    await warmer.warm_all(workers, lambda progress: pytest.fail("there is nothing to tell"))
    await warmer.warm_again(workers, "w0")
    assert not workers.plans


async def test_a_run_that_fails_is_logged_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    workers = FakeWorkers("w0")

    def fail(worker_id: WorkerId, plan: DispatchPlan) -> PlanReport:
        code = "out_of_memory" if len(workers.plans) == 2 else "worker_failed"
        return PlanReport(plan.plan_id, "failed", error=f"failure {len(workers.plans)}", code=code)

    workers.answer = fail
    with caplog.at_level("INFO"):
        await make_warmer(ORDER).warm_all(workers, lambda progress: None)
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels["m is not warmed up at 64x64 on w0: failure 1"] == "WARNING"
    assert levels["m is not warmed up at 512x512: failure 2"] == "INFO"
    assert len(workers.handles["w0"].forgotten) == 2


async def test_a_worker_that_is_lost_is_not_waited_for_nor_warmed_up_at_its_next_start() -> None:
    workers, warmer = FakeWorkers("w0"), make_warmer(ORDER)
    warming = asyncio.create_task(warmer.warm_all(workers, lambda progress: None))
    workers.answer = lambda worker_id, plan: None
    await asyncio.sleep(0)
    workers.handles["w0"].broken.set_result("killed")
    await asyncio.wait_for(warming, 10)
    num_plans, back = len(workers.plans), FakeWorkers("w0")
    await warmer.warm_again(back, "w0")
    assert (num_plans, len(back.plans)) == (2, 0)
    await warmer.warm_again(back, "w0")
    assert len(back.plans) == 2


async def test_a_warm_up_that_takes_too_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tridentserve.engine.live.warming.warmer._LONGEST_S", 0.01)
    workers = FakeWorkers("w0")
    workers.answer = lambda worker_id, plan: None
    await asyncio.wait_for(make_warmer(ORDER).warm_all(workers, lambda progress: None), 10)
    assert "the warm-up is given up after 0.01 s and 0 of 2 runs" in caplog.text
    assert len(workers.handles["w0"].forgotten) == len(workers.plans) == 1


async def test_the_warm_up_of_a_worker_that_comes_back_is_told_while_it_lasts() -> None:
    workers, warmer = FakeWorkers("w0", "w1"), make_warmer(ORDER)
    seen = []

    def look(worker_id: WorkerId, plan: DispatchPlan) -> PlanReport:
        seen.append((worker_id, dict(warmer.progress)))
        return PlanReport(plan.plan_id, "finished")

    workers.answer = look
    await warmer.warm_again(workers, "w1")
    assert [(worker_id, list(progress), progress["w1"]["done"]) for worker_id, progress in seen] == [
        ("w1", ["w1"], 0),
        ("w1", ["w1"], 1),
    ]
    assert not warmer.progress
