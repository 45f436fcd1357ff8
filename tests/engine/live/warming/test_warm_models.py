"""The warm-up for a model that has been added: the workers serve meanwhile, and the scheduler knows what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.engine.live.warming.test_warmer import ORDER, FakeWorkers, make_warmer
from tests.support.waiting import until
from tridentserve.engine.live.messages import PlanReport, ReplicaLoad
from tridentserve.engine.live.warming.beside_service import BesideService, WarmUpStop
from tridentserve.engine.live.worker_handle import PlanItem, WorkerHandle
from tridentserve.errors import WorkerError
from tridentserve.plans import DispatchPlan, Replica, WorkerId
from tridentserve.scheduling import events as ev
from tridentserve.stages import Stage


async def test_one_worker_after_another_and_the_scheduler_hears_of_each_plan() -> None:
    workers, warmer = FakeWorkers("w0", "w1"), make_warmer()
    posted: list[ev.Event] = []
    seen: list[tuple[WorkerId, object, int]] = []

    def look(worker_id: WorkerId, plan: DispatchPlan) -> PlanReport:
        assert isinstance(posted[-1], ev.WarmUpBegun)
        assert posted[-1].plan == plan
        seen.append((worker_id, warmer.model_progress["m"]["done"], plan.degree))
        return PlanReport(plan.plan_id, "finished")

    workers.answer = look
    await warmer.warm_model(workers, ORDER, posted.append)
    alone = [("w0", 0, 1), ("w0", 1, 1), ("w1", 2, 1), ("w1", 3, 1)]
    assert seen == [*alone, ("w0", 4, 2), ("w1", 4, 2), ("w0", 5, 2), ("w1", 5, 2)]
    assert [type(event) for event in posted] == [ev.WarmUpBegun, ev.WarmUpEnded] * 6, "never two at once on a node"
    assert not warmer.model_progress
    await warmer.warm_again(workers, "w1")
    assert len(workers.plans) == 8 + 2, "a worker that comes back later is warmed up for the model, too"


async def test_a_busy_worker_is_warmed_up_when_it_has_no_plan() -> None:
    workers, warmer = FakeWorkers("w0"), make_warmer()
    workers.handles["w0"].idle.clear()
    warming = asyncio.create_task(warmer.warm_model(workers, ORDER, lambda event: None))
    await until(lambda: "m" in warmer.model_progress)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not workers.plans
    workers.handles["w0"].idle.set()
    await asyncio.wait_for(warming, 10)
    assert len(workers.plans) == 2


async def test_a_worker_that_is_never_idle_is_warmed_up_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tridentserve.engine.live.warming.beside_service._PATIENCE_S", 0.01)
    workers = FakeWorkers("w0")
    workers.handles["w0"].idle.clear()
    await asyncio.wait_for(make_warmer().warm_model(workers, ORDER, lambda event: None), 10)
    assert len(workers.plans) == 2


async def test_the_scheduler_hears_which_weights_came() -> None:
    posted: list[ev.Event] = []
    heard: list[PlanItem] = []
    beside = BesideService(posted.append, WarmUpStop())
    take = beside.listen("w0", heard.append)
    load = ReplicaLoad(Replica("m", Stage.DIFFUSE), (Replica("old", Stage.DIFFUSE),), "host", 7, 0.5)
    take(load)
    take(PlanReport(1, "finished"))
    assert posted == [ev.ReplicaLoaded("w0", load.loaded, load.evicted, "host", 7, 0.5)]
    assert heard == [load, PlanReport(1, "finished")]


async def test_a_model_that_is_removed_is_not_warmed_up_further() -> None:
    workers, warmer = FakeWorkers("w0"), make_warmer()
    reports: list[Callable[[], None]] = []
    run_plan = workers.run_plan

    def hold_back(
        worker_id: WorkerId, plan: DispatchPlan, inputs: object, take: Callable[[PlanItem], None], peak: object
    ) -> bool:
        reports.append(lambda: take(PlanReport(plan.plan_id, "finished")))
        workers.answer = lambda worker_id, plan: None
        return run_plan(worker_id, plan, {}, take, peak)  # type: ignore[arg-type]

    workers.run_plan = hold_back  # type: ignore[method-assign]
    warming = asyncio.create_task(warmer.warm_model(workers, ORDER, lambda event: None))
    await until(lambda: bool(reports))
    dropping = asyncio.create_task(warmer.drop_model("m"))
    await asyncio.sleep(0)
    assert not dropping.done(), "a plan of the model is under way"
    reports[0]()
    await asyncio.wait_for(asyncio.gather(warming, dropping), 10)
    assert len(workers.plans) == 1
    await warmer.warm_again(workers, "w0")
    assert len(workers.plans) == 1


async def test_a_worker_is_idle_when_its_last_plan_has_ended() -> None:
    handle = WorkerHandle(actor=None)  # type: ignore[arg-type]
    calls = handle._plans
    await asyncio.wait_for(handle.wait_until_idle(), 10)
    for plan_id in (1, 2):
        calls.begin(plan_id, lambda item: None)
    calls.take_report(PlanReport(1, "finished"))
    waiting = asyncio.create_task(handle.wait_until_idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    calls.take_report(PlanReport(2, "finished"))
    await asyncio.wait_for(waiting, 10)
    failed: list[PlanItem] = []
    calls.begin(3, failed.append)
    handle.fail_plans("killed")
    await asyncio.wait_for(handle.wait_until_idle(), 10)
    assert isinstance(failed[0], WorkerError)
