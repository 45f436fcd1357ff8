"""Workers that Ray cannot reach: no call is lost silently, and no actor is left behind with its device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live import fleet as fleet_module
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


class QuietHandle:
    """A worker that answers, or does not, or has gone."""

    def __init__(self, answer: int | Exception | None) -> None:
        self.answer, self.is_killed = answer, False

    async def count_parcels(self) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if self.answer is not None else await asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize(
    ("answer", "is_killed"),
    [(0, False), (ChannelError("gone"), False), (None, True)],
    ids=["answers", "gone", "silent"],
)
async def test_a_worker_that_does_not_answer_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any, is_killed: bool
) -> None:
    monkeypatch.setattr(fleet_module, "SILENCE_S", 0.05)
    fleet = WorkerFleet([config_of(0, tmp_path)], ActorSpawner(0.1), lambda config: None, lambda worker_id, why: None)
    await fleet.end_if_silent("w")  # which is down
    handle: Any = QuietHandle(answer)
    fleet._workers["w"].handle = handle
    await fleet.end_if_silent("w")
    assert handle.is_killed == is_killed


async def test_what_a_worker_needs_is_brought_to_it_before_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its node may be another one, which has nothing of the models. Bringing it may fail too."""
    done: list[str] = []

    async def bring(bundle: int) -> None:
        done.append(f"bring to {bundle}")
        if len(done) < 3:
            raise OSError("no connection")

    async def bring_back(self: WorkerFleet, worker_id: str, member: Any) -> bool:
        done.append("try")
        return len(done) == 5

    monkeypatch.setattr(fleet_module, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(WorkerFleet, "_bring_back", bring_back)
    spawner = ActorSpawner(0.1, bundles=(7,), bring=bring)
    fleet = WorkerFleet([config_of(0, tmp_path)], spawner, lambda config: None, lambda worker_id, why: None)
    await fleet._try_until_back("w", fleet._workers["w"])
    assert done == ["try", "bring to 7", "try", "bring to 7", "try"]
    await ActorSpawner(0.1).prepare(0)  # which has nothing to bring
