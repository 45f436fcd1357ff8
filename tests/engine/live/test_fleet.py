"""Workers that Ray cannot reach: no call is lost silently, and no actor is left behind with its device."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live import fleet as fleet_module
from tridentserve.engine.live.fleet import WorkerFleet, WorkerResources
from tridentserve.engine.live.messages import WorkerConfig
from tridentserve.engine.live.worker.worker_actor import WorkerHandle
from tridentserve.engine.options import WorkerOptions
from tridentserve.parallel import connect_store
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.stages import Stage


def config_of(store_port: int, host_dir: Path) -> WorkerConfig:
    return WorkerConfig(
        spec=WorkerSpec("w", "node", 1 << 30),
        incarnation=0,
        label="nothing",
        replicas=frozenset(),
        sources={},
        store_host="127.0.0.1",
        store_port=store_port,
        options=WorkerOptions(handoff_bytes=1 << 20, host_dir=host_dir, max_denoising=3),
    )


def test_a_call_that_ray_cannot_make_is_reported_and_takes_no_turn(tmp_path: Path) -> None:
    fleet = WorkerFleet(
        [config_of(1, tmp_path)], WorkerResources(0.1), lambda config: None, lambda worker_id, why: None
    )
    plan = DispatchPlan(1, "m", (Stage.ENCODE,), ("w",), (PlanMember("r"),))
    turns: list[int] = []

    def call(number: int, *_: object) -> str:
        turns.append(number)
        if len(turns) == 1:
            raise OSError("the object store is full")
        return "a call"

    actor: Any = SimpleNamespace(run_plan=SimpleNamespace(remote=call))
    fleet._workers["w"].handle = WorkerHandle(actor)
    assert fleet.run_plan("w", plan, {}) is None
    assert str(fleet.run_plan("w", plan, {})) == "a call"
    assert turns == [0, 0]


@pytest.mark.slow
async def test_a_worker_that_only_seems_dead_is_ended_before_it_is_replaced(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect_store(is_server=True)
    joined, broken = asyncio.Queue[WorkerConfig](), asyncio.Event()
    fleet = WorkerFleet(
        [config_of(store.port, tmp_path)], WorkerResources(0.1), joined.put_nowait, lambda worker_id, why: None
    )

    async def breaks(forever: Awaitable[None]) -> str:
        monkeypatch.undo()  # the next one does not
        await broken.wait()
        return "the connection is broken"

    monkeypatch.setattr(fleet_module, "_wait_for_error", breaks)
    await fleet.start()
    try:
        assert (await joined.get()).incarnation == 0
        former = fleet.get_handle("w")
        broken.set()
        again = await joined.get()
        assert (again.incarnation, again.spec.max_denoising) == (1, 3)
        with pytest.raises(RayActorError):
            await former.count_parcels()
        assert await fleet.get_handle("w").count_parcels() == 0
    finally:
        await fleet.stop()
    del store
