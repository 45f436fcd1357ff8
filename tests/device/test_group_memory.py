"""The memory of process groups, which only the device knows: measured as they are made, and taken from the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deployments.preparation.worker_memory import share_gpu_bytes
from tests.device.recording import CPU, RecordingDevice, use_recording_device
from tridentserve.byte_sizes import MIB
from tridentserve.cluster import WorkerSpec
from tridentserve.device import DeviceMemory, find_device
from tridentserve.device.cpu_device import CpuDevice
from tridentserve.device.cuda_device import CudaDevice
from tridentserve.device.memory_limit import check_budget
from tridentserve.engine.live.fleet import WorkerFleet
from tridentserve.engine.live.messages import WorkerConfig
from tridentserve.engine.live.weights.replica_store import MemoryBudget, ReplicaStore
from tridentserve.engine.live.worker import worker
from tridentserve.engine.live.worker.device_thread import DeviceThread
from tridentserve.engine.live.worker.worker import WorkerParts
from tridentserve.engine.options import WorkerOptions
from tridentserve.errors import ConfigError, GroupError, OutOfMemoryError
from tridentserve.parallel import GroupCache, GroupMemory, connect_store
from tridentserve.parallel.groups import SequenceGroup
from tridentserve.plans import Replica
from tridentserve.scheduling.estimation.hot_groups import GROUP_BYTES, LARGEST_GROUP_BYTES
from tridentserve.stages import Stage

GB, PATIENCE_S = 10**9, 20.0
D = frozenset({Replica("m", Stage.DIFFUSE)})


class SmallDevice(RecordingDevice):
    """A device of 1000 bytes, whose groups take what `takes` says, one after another, at their first collective."""

    kind = "cpu"  # groups are of gloo

    def __init__(self, *takes: int) -> None:
        super().__init__()
        self.outside_bytes = 50
        self.seen_at_closings: list[int] = []
        self._takes = list(takes)

    def measure_memory(self) -> DeviceMemory | None:
        return DeviceMemory(1000, self.outside_bytes)

    def wait_for_work(self) -> None:
        self.outside_bytes += self._takes.pop(0)

    def abort_group(self, process_group: Any) -> None:
        self.seen_at_closings.append(self.outside_bytes)


class _LargeDevice(RecordingDevice):
    """A GPU of 1050 MiB, of which 50 are taken."""

    name = "my GPU"

    def measure_memory(self) -> DeviceMemory | None:
        return DeviceMemory(1050 * MIB, 50 * MIB)


def make_cache(device: RecordingDevice, memory: GroupMemory, capacity: int = 8) -> GroupCache:
    return GroupCache(connect_store(is_server=True), CPU, capacity=capacity, timeout_s=PATIENCE_S, memory=memory)


@pytest.mark.parametrize("mib", [900, 950])
def test_a_budget_that_the_device_has_is_taken(mib: int, caplog: pytest.LogCaptureFixture) -> None:
    check_budget(_LargeDevice(), mib * MIB)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_budget_that_leaves_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    check_budget(_LargeDevice(), 960 * MIB)
    assert "cluster.memory_mb: 960 MiB, and my GPU has 1000 MiB for a worker, which leaves little" in caplog.text
    assert "at most 950" in caplog.text


def test_a_budget_that_the_device_does_not_have_is_refused_with_both_numbers() -> None:
    said = r"cluster.memory_mb: 1001 MiB, and my GPU has 1000 MiB for a worker \(50 of its 1050 .* at most 950"
    with pytest.raises(ConfigError, match=said):
        check_budget(_LargeDevice(), 1001 * MIB)
    check_budget(CpuDevice(CPU), 10**15)  # whose memory processes share


def test_a_worker_that_gets_more_than_its_device_has_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded before: this worker has nothing else."""
    monkeypatch.setattr(worker, "find_device", lambda _: _LargeDevice())
    parts = WorkerParts.__new__(WorkerParts)
    parts.device_thread = DeviceThread()
    spec = WorkerSpec("w", "node", memory_bytes=1001 * MIB)
    parts.config = cast(WorkerConfig, SimpleNamespace(spec=spec, sources={}, options=WorkerOptions(handoff_bytes=1)))
    with pytest.raises(ConfigError, match=r"cluster\.memory_mb"):
        asyncio.run(parts.start(lambda channel: None))


def test_the_largest_group_is_what_one_more_may_take() -> None:
    with use_recording_device(SmallDevice(120, 200, 10)) as device:
        memory = GroupMemory(device)
        cache, budget = make_cache(device, memory), MemoryBudget(900, 10, 100, memory.count_missing_bytes)
        assert (memory.largest_bytes, budget.reserve_bytes) == (0, 110), "as planned, while none was made"
        cache.acquire("a", 0, 1, use=1)
        assert memory.largest_bytes == 120
        assert budget.group_bytes == 100 + (800 - (1000 - 50 - 120 - 120))
        cache.prepare("b", 0, 1, -2, ("w",))
        cache.acquire("b", 0, 1, use=3)  # it is there
        cache.acquire("c", 0, 1, use=4)
        assert memory.largest_bytes == 200
        assert budget.group_bytes == 100 + (800 - (1000 - 50 - 330 - 200))


def test_groups_that_leave_enough_change_nothing() -> None:
    with use_recording_device(SmallDevice(100, -30)) as device:
        memory = GroupMemory(device)
        cache, budget = make_cache(device, memory), MemoryBudget(600, 10, 100, memory.count_missing_bytes)
        cache.acquire("a", 0, 1, use=1)
        cache.acquire("b", 0, 1, use=2)  # something else was freed meanwhile
        assert memory.largest_bytes == 100
        assert budget.group_bytes == 100


async def test_weights_have_no_room_where_groups_took_it() -> None:
    async def at_once(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    async def load(*_: Any) -> Any:
        return SimpleNamespace(num_bytes=600, source="host")

    loader = SimpleNamespace(open=lambda _: SimpleNamespace(layout=None, num_bytes=600, seconds=0.0), load=load)
    with use_recording_device(SmallDevice(200)) as device:
        memory = GroupMemory(device)
        budget = MemoryBudget(900, 10, 100, memory.count_missing_bytes)
        store = ReplicaStore(cast(Any, None), CPU, budget, at_once, cast(Any, loader), None)
        store._attach = lambda *_: None  # type: ignore[method-assign]
        make_cache(device, memory).acquire("a", 0, 1, use=1)
        with pytest.raises(OutOfMemoryError, match=r"needs 960 bytes .* 350 for process groups.*, this worker has 900"):
            await store.prepare(tuple(D))


def test_the_least_recently_used_group_gives_its_memory_back_before_another_takes_some() -> None:
    with use_recording_device(SmallDevice(100, 100, 100)) as device:
        cache = make_cache(device, GroupMemory(device), capacity=2)
        for use, name in enumerate("abc"):
            cache.acquire(name, 0, 1, use=use)
        assert cache.names == ("b", "c")
        assert cast(SmallDevice, device).seen_at_closings == [250], "before c had taken its 100"


class RecordedGroup:
    """A process group of two that writes down its collectives."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            return SimpleNamespace(wait=lambda: None)

        return call


@pytest.fixture
def recorded() -> tuple[RecordedGroup, SequenceGroup]:
    made = RecordedGroup()
    return made, SequenceGroup("pair@1", cast(Any, made), CPU)


def test_all_kinds_of_collectives_are_connected_before_a_group_is_measured(
    recorded: tuple[RecordedGroup, SequenceGroup],
) -> None:
    """NCCL takes buffers at the first of each kind."""
    process_group, group = recorded
    with use_recording_device(RecordingDevice()) as device:
        group.connect()
        assert process_group.calls == ["broadcast", "alltoall_base", "_allgather_base"]
        assert device.calls == ["wait for work"]


def test_groups_in_host_memory_are_neither_connected_nor_measured(
    recorded: tuple[RecordedGroup, SequenceGroup],
) -> None:
    process_group, group = recorded
    group.connect()
    assert process_group.calls == []
    memory = GroupMemory(find_device(CPU))
    make_cache(cast(Any, None), memory).acquire("alone", 0, 1, use=1)
    assert (memory.largest_bytes, memory.count_missing_bytes(1 << 60)) == (0, 0)


def test_a_group_that_fails_is_not_measured() -> None:
    with use_recording_device(SmallDevice()) as device:
        memory = GroupMemory(device)
        with pytest.raises(GroupError), memory.measure(2):
            raise GroupError("a member is gone")
        assert memory.count_missing_bytes(1 << 60) == 0


def test_memory_that_the_allocator_takes_meanwhile_is_not_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = iter([100, 300, 300, 300])
    free = iter([900, 600])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(reserved))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 1000))
    assert CudaDevice(torch.device("cuda")).measure_memory() == DeviceMemory(1000, 100)


class AnsweringHandle:
    """A worker that starts at once, and whose groups took more than was planned for them."""

    actor = None

    def __init__(self, missing_bytes: int) -> None:
        self._missing_bytes = missing_bytes

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any) -> int:
            return self._missing_bytes if name == "make_groups" else 0

        return call

    def prepare_groups(self, *_: Any) -> None:
        pass


async def test_the_scheduler_plans_with_what_groups_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same for all workers, also for one that comes back."""
    joined: list[WorkerConfig] = []
    missing = {"w0": 0, "w1": 250}
    configs = [WorkerConfig(WorkerSpec(each, "node", 900), 0, "", D, {}, {}, "", 0, hot_width=2) for each in missing]
    spawner = SimpleNamespace(spawn=lambda config, index: AnsweringHandle(missing[config.spec.worker_id]))
    fleet = WorkerFleet(configs, cast(Any, spawner), joined.append, lambda worker_id, why: None)

    async def start(handle: Any) -> Any:
        return SimpleNamespace(max_denoising=None, node_id="node", channel=None)

    async def watch(*_: Any) -> None:
        pass

    monkeypatch.setattr("tridentserve.engine.live.fleet._start_and_connect", start)
    monkeypatch.setattr("tridentserve.engine.live.fleet.ray.put", lambda value: value)
    monkeypatch.setattr(fleet, "_watch", watch)
    await fleet.start()
    assert [config.spec.memory_bytes for config in joined] == [650, 650]
    assert await fleet._bring_back("w1", fleet._workers["w1"])
    assert fleet._workers["w1"].config.spec.memory_bytes == 900, "the worker itself measures again"
    fleet._begin_watch("w1")
    assert joined[-1].spec.memory_bytes == 650


def test_auto_leaves_room_for_the_groups_of_the_start_and_one_more() -> None:
    for free_bytes, workers, expected_bytes in (
        (140 * GB, 8, int(0.95 * 140 * GB)),  # a twentieth is enough
        (20 * GB, 1, 19 * GB),
        (20 * GB, 8, 20 * GB - 4 * LARGEST_GROUP_BYTES + 8 * GROUP_BYTES["cuda"]),
        (20 * GB, 4, 19 * GB),
    ):
        assert share_gpu_bytes(free_bytes, workers, 8) == expected_bytes
    assert share_gpu_bytes(20 * GB, 8, 2) == 20 * GB - 2 * LARGEST_GROUP_BYTES + 2 * GROUP_BYTES["cuda"]
