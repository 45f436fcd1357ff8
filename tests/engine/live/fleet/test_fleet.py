"""Workers that Ray cannot reach: no call is lost silently, and no actor is left behind with its device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.channels.channel import ChannelError
from tridentserve.engine.live.fleet import WorkerFleet
from tridentserve.engine.live.messages import WorkerConfig
from tridentserve.engine.live.plan_calls import PeakEstimator
from tridentserve.engine.live.spawning.spawner import ActorSpawner
from tridentserve.engine.live.warming.warmer import Warmer, WarmUpProgress
from tridentserve.engine.live.worker_handle import WorkerHandle
from tridentserve.engine.options import WorkerOptions
from tridentserve.parallel import connect_store
from tridentserve.plans import WorkerId


def config_of(store_port: int, host_dir: Path) -> WorkerConfig:
    return WorkerConfig(
        spec=WorkerSpec("w", "node", 1 << 30),
        incarnation=0,
        label="nothing",
        replicas=frozenset(),
        sources={},
        shares={},
        store_host="127.0.0.1",
        store_port=store_port,
        options=WorkerOptions(handoff_bytes=1 << 20, host_dir=host_dir, max_denoising=3),
    )


class RecordingWarmer(Warmer):
    """Notes when workers are warmed up, and which ones the scheduler knows of then."""

    def __init__(self) -> None:
        super().__init__((), PeakEstimator(None))
        self.noted: list[tuple[str, list[str], list[str]]] = []

    async def warm_all(self, workers: Any, tell: Callable[[WarmUpProgress], object]) -> None:
        self.noted.append(("all", workers.alive, workers.joined))

    async def warm_again(self, workers: Any, worker_id: WorkerId) -> None:
        self.noted.append((worker_id, workers.alive, workers.joined))


@pytest.mark.slow
async def test_a_worker_that_only_seems_dead_is_ended_before_it_is_replaced(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect_store(is_server=True)
    joined, broken = asyncio.Queue[WorkerConfig](), asyncio.Event()
    configs, warmer = [config_of(store.port, tmp_path)], RecordingWarmer()
    fleet = WorkerFleet(configs, ActorSpawner(0.1), joined.put_nowait, lambda worker_id, why: None, warmer)

    async def breaks(handle: WorkerHandle) -> str:
        monkeypatch.undo()  # the next one does not
        await broken.wait()
        return "the connection is broken"

    monkeypatch.setattr(WorkerHandle, "wait_for_break", breaks)
    await fleet.start()
    try:
        assert (await joined.get()).incarnation == 0
        former = fleet.get_handle("w")
        broken.set()
        again = await joined.get()
        assert (again.incarnation, again.spec.max_denoising) == (1, 3)
        with pytest.raises(ChannelError):
            await former.count_parcels()
        with pytest.raises(RayActorError):
            await former.watch()
        assert await fleet.get_handle("w").count_parcels() == 0
        assert warmer.noted == [("all", ["w"], []), ("w", ["w"], [])]
        assert fleet.joined == ["w"]
    finally:
        await fleet.stop()
    del store
