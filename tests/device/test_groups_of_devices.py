"""Groups whose collectives run on a device: commands wait for none of its work, what hangs is ended from outside."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.device.recording import CPU, RecordingDevice, use_recording_device
from tridentserve.cluster import WorkerSpec
from tridentserve.device import find_device
from tridentserve.device.cuda_device import CudaDevice
from tridentserve.engine.live.fleet import WorkerFleet
from tridentserve.engine.live.messages import PlanReport, WorkerConfig
from tridentserve.engine.live.plan_driver import PlanDriver, _GivenPlan
from tridentserve.engine.live.worker.denoising import StepControl
from tridentserve.engine.live.worker.executor import Execution, StageExecutor, _StageRun
from tridentserve.errors import GroupError
from tridentserve.parallel import GroupCache, connect_store, group_cache, make_group
from tridentserve.parallel.groups import SequenceGroup
from tridentserve.parallel.token_sharding import TokenSharding
from tridentserve.plans import DispatchPlan, PlacementPlan, PlanMember, Replica
from tridentserve.scheduling.estimation.hot_groups import HotGroup
from tridentserve.stages import Stage

PATIENCE_S = 20.0
ERROR_HANDLING, CLEAN_UP_ONLY = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
PAIR = ("w0", "w1")


class HangingGroup:
    """A process group of two whose other member never comes, as NCCL has it: its collectives end when they are aborted,
    and then the next one fails."""

    def __init__(self) -> None:
        self.waits, self.aborted = threading.Event(), threading.Event()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def broadcast(self, tensor: torch.Tensor, root: int) -> HangingGroup:
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        return self

    def wait(self) -> None:
        self.waits.set()
        assert self.aborted.wait(PATIENCE_S)

    def abort(self) -> None:
        self.aborted.set()


class AbortingDevice(RecordingDevice):
    def abort_group(self, process_group: Any) -> None:
        process_group.abort()


@pytest.fixture
def device() -> Iterator[RecordingDevice]:
    with use_recording_device(AbortingDevice()) as recording:
        yield recording


@pytest.fixture
def hanging(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> tuple[GroupCache, HangingGroup]:
    """A cache whose groups hang."""
    process_group, store = HangingGroup(), connect_store(is_server=True)
    store.set(group_cache._make_key("pair", 7, 1), "")
    monkeypatch.setattr(
        group_cache, "make_group", lambda _, name, *rest: SequenceGroup(name, cast(Any, process_group), CPU)
    )
    return GroupCache(store, CPU, capacity=4, timeout_s=PATIENCE_S), process_group


@pytest.mark.parametrize("why", ["member lost", "plan failed"])
def test_a_collective_that_hangs_is_ended_from_another_thread(
    hanging: tuple[GroupCache, HangingGroup], why: str
) -> None:
    cache, process_group = hanging
    with ThreadPoolExecutor(max_workers=1) as device_thread:
        making = device_thread.submit(cache.acquire, "pair", 0, 2, 7, PAIR)
        assert process_group.waits.wait(PATIENCE_S)
        cache.abort_use("pair", 6)  # of an earlier plan
        cache.abort_groups_of("w2")  # of another group
        assert not process_group.aborted.is_set()
        if why == "member lost":
            cache.abort_groups_of("w1")
        else:
            cache.abort_use("pair", 7)
        with pytest.raises(GroupError, match="has failed"):  # by the next one: what the device waits for raises nothing
            making.result(PATIENCE_S)


def test_a_member_that_is_lost_while_its_group_is_made_is_noticed(
    hanging: tuple[GroupCache, HangingGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, process_group = hanging

    def make_and_lose(_: object, name: str, *rest: object) -> SequenceGroup:
        cache.abort_groups_of("w1")
        return SequenceGroup(name, cast(Any, process_group), CPU)

    monkeypatch.setattr(group_cache, "make_group", make_and_lose)
    with pytest.raises(GroupError, match="a member was lost while it was made"):
        cache.acquire("pair", 0, 2, 7, PAIR)
    assert process_group.aborted.is_set()
    assert cache.names == ()


class StuckGroup(HangingGroup):
    """Its abort ends only when that of another group has, and fails, as NCCL's does at its own timeout."""

    def __init__(self, other: HangingGroup) -> None:
        super().__init__()
        self._other = other

    def abort(self) -> None:
        assert self._other.aborted.wait(PATIENCE_S)
        raise RuntimeError("the abort has timed out")


def test_a_group_that_cannot_be_aborted_holds_up_no_other(
    device: RecordingDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = HangingGroup()
    process_groups = {"stuck@7": StuckGroup(other), "other@8": other}
    store = connect_store(is_server=True)
    monkeypatch.setattr(SequenceGroup, "connect", lambda group: None)
    monkeypatch.setattr(
        group_cache, "make_group", lambda _, name, *rest: SequenceGroup(name, cast(Any, process_groups[name]), CPU)
    )
    cache = GroupCache(store, CPU, capacity=4, timeout_s=PATIENCE_S)
    for name, use in (("stuck", 7), ("other", 8)):
        store.set(group_cache._make_key(name, use, 1), "")
        cache.acquire(name, 0, 2, use, PAIR)
    cache.abort_groups_of("w1")
    assert other.aborted.is_set()
    assert "group stuck@7 cannot be aborted" in caplog.text


def test_a_stage_whose_collectives_were_given_up_has_not_ended_well(device: RecordingDevice) -> None:
    """On a device they raise nothing: the kernels end, with whatever bytes there are."""
    process_group = HangingGroup()
    process_group.abort()
    group = SequenceGroup("pair@1", cast(Any, process_group), CPU, control=cast(Any, HangingGroup()))
    plan = DispatchPlan(0, "m", (Stage.DIFFUSE,), PAIR, (PlanMember("r", (0, 1)),))
    execution = Execution()
    executor = StageExecutor("w0", cast(Any, None), cast(Any, None), device)
    run = _StageRun(plan, Stage.DIFFUSE, group, {}, execution, StepControl())
    with pytest.raises(GroupError, match="aborted"), executor._time_stage(run):
        pass
    assert execution.spans == []


class RecordedCommands:
    """A process group of one in host memory."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def broadcast(self, tensor: torch.Tensor, root: int) -> RecordedCommands:
        self._calls.append(f"command of {tensor.nbytes} bytes")
        return self

    def allreduce(self, tensor: torch.Tensor, operation: Any) -> RecordedCommands:
        self._calls.append(f"command of {tensor.nbytes} bytes for which all wait")
        return self

    def wait(self) -> None:
        self._calls.append("wait for the command")


def test_commands_wait_for_nothing_on_the_device(device: RecordingDevice) -> None:
    calls: list[str] = []
    group = SequenceGroup("pair@1", cast(Any, HangingGroup()), CPU, control=cast(Any, RecordedCommands(calls)))
    assert group.agree(2) == 2
    assert group.broadcast_json([1]) == [1]
    waited = ["command of 8 bytes for which all wait", "wait for the command"]
    assert calls == [*waited, *waited, "command of 3 bytes", "wait for the command"]
    assert device.calls == []


def test_a_device_has_a_second_group_for_commands(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AbortingDevice, "kind", "cpu")
    monkeypatch.setattr(AbortingDevice, "abort_group", lambda *_: None)
    group = make_group(connect_store(is_server=True), "alone", 0, 1, CPU, PATIENCE_S)
    assert group._control is not None
    assert group.agree(3) == 3
    group.confirm()
    group.close()
    with pytest.raises(GroupError):
        group.agree()


def test_hot_groups_are_made_beside_plans() -> None:
    """Two members, each with a thread for plans and one for hot groups."""
    server = connect_store(is_server=True)
    caches = [GroupCache(connect_store(port=server.port), CPU, capacity=2, timeout_s=PATIENCE_S) for _ in PAIR]
    executors = [
        StageExecutor(worker_id, cast(Any, None), cache, find_device(CPU))
        for worker_id, cache in zip(PAIR, caches, strict=True)
    ]
    hot = [HotGroup("pair", PAIR), HotGroup("pair again", PAIR), HotGroup("no room", PAIR)]
    with ThreadPoolExecutor(max_workers=2) as pool:

        def use(name: str, plan_id: int) -> list[str]:
            acquired = [pool.submit(cache.acquire, name, rank, 2, plan_id, PAIR) for rank, cache in enumerate(caches)]
            return [each.result(PATIENCE_S).name for each in acquired]

        for making in ([hot[0]], hot):
            for each in [pool.submit(executor.prepare_groups, making, 1 + len(making)) for executor in executors]:
                each.result(PATIENCE_S)
        assert [cache.names for cache in caches] == [("pair", "pair again")] * 2
        assert use("pair", 5) == ["pair@-2"] * 2, "the one that was there before"
        assert use("pair again", 6) == ["pair again@-4"] * 2
        caches[1].drop("pair")
        assert use("pair", 7) == ["pair@7"] * 2


def test_a_hot_group_that_waits_for_a_member_holds_no_plan_up() -> None:
    """Calls over one connection to the store wait for each other."""
    server, waits = connect_store(is_server=True), threading.Event()

    def connect() -> Any:
        waits.set()
        return connect_store(port=server.port)

    cache = GroupCache(connect_store(port=server.port), CPU, capacity=2, timeout_s=PATIENCE_S, connect=connect)
    with ThreadPoolExecutor(max_workers=2) as pool:
        preparing = pool.submit(cache.prepare, "late", 0, 2, -2, PAIR)
        assert waits.wait(PATIENCE_S)
        server.wait([group_cache._make_key("late", -2, 0)])
        assert pool.submit(cache.acquire, "alone", 0, 1, 5, ("w0",)).result(PATIENCE_S / 2).name == "alone@5"
        assert not preparing.done()
        group_cache.abandon(server, "late", 1, -2)
        assert isinstance(preparing.exception(PATIENCE_S), GroupError)


class RecordedHandle:
    """The engine's handle of a worker."""

    def __init__(self, calls: list[tuple[Any, ...]], worker_id: str) -> None:
        self._calls, self._worker_id, self.actor = calls, worker_id, None

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if "groups" in name:
                self._calls.append((self._worker_id, name, *args))
            return answered()

        return call


class Answered:
    def __await__(self) -> Iterator[None]:
        return iter(())


def answered() -> Any:
    return Answered()


async def test_a_new_placement_and_a_restart_make_groups_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    configs = [
        WorkerConfig(WorkerSpec(worker_id, "node", 1), 0, "", frozenset(), {}, {}, "", 0, hot_width=2)
        for worker_id in PAIR
    ]
    spawner = SimpleNamespace(spawn=lambda config, index: RecordedHandle(calls, config.spec.worker_id))
    fleet = WorkerFleet(configs, cast(Any, spawner), lambda config: None, lambda worker_id, why: None)
    for worker_id, member in fleet._workers.items():
        member.handle = cast(Any, RecordedHandle(calls, worker_id))
    fleet.set_placement(PlacementPlan({worker_id: frozenset({Replica("m", Stage.DECODE)}) for worker_id in PAIR}))
    assert calls == [], "nothing denoises together"
    fleet.set_placement(PlacementPlan({worker_id: frozenset({Replica("m", Stage.DIFFUSE)}) for worker_id in PAIR}))
    pair = [HotGroup("w0#0,w1#0/0", PAIR)]
    assert calls == [("w0", "prepare_groups", pair, 2), ("w1", "prepare_groups", pair, 2)]
    calls.clear()
    ready = SimpleNamespace(max_denoising=None, node_id="node", channel=None)

    async def start(handle: Any) -> Any:
        return ready

    monkeypatch.setattr("tridentserve.engine.live.fleet._start_and_connect", start)
    member = fleet._workers["w1"]
    member.handle = None
    assert await fleet._bring_back("w1", member)
    pair = [HotGroup("w0#0,w1#1/0", PAIR)]
    assert calls == [("w0", "prepare_groups", pair, 3), ("w1", "prepare_groups", pair, 3)]


async def test_others_of_a_lost_worker_and_of_a_failed_plan_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    configs = [WorkerConfig(WorkerSpec(each, "node", 1), 0, "", frozenset(), {}, {}, "", 0) for each in PAIR]
    fleet = WorkerFleet(configs, cast(Any, None), lambda config: None, lambda worker_id, why: None)
    for worker_id, member in fleet._workers.items():
        member.handle = cast(Any, RecordedHandle(calls, worker_id))
    plan = DispatchPlan(4, "m", (Stage.DIFFUSE,), PAIR, (PlanMember("r", (0, 1)),))
    nobody = cast(Any, None)
    driver = PlanDriver(fleet, nobody, nobody, nobody, nobody, nobody, 0.0, nobody)
    given = driver._plans[4] = _GivenPlan(plan, {}, [None, None])
    driver._note_report(given, 1, PlanReport(4, "failed", error="memory ran out"))
    assert calls == [("w0", "abort_groups_of_plan", 4)]
    calls.clear()

    async def bring_back(*_: Any) -> bool:
        await asyncio.Event().wait()
        return True

    async def die(*_: Any) -> str:
        return "killed"

    monkeypatch.setattr("tridentserve.engine.live.fleet._wait_for_death", die)
    monkeypatch.setattr("tridentserve.engine.live.fleet._wait_for_first", die)
    monkeypatch.setattr(fleet, "_bring_back", bring_back)
    handle = SimpleNamespace(kill=lambda: None, fail_plans=lambda why: None, wait_for_break=die)
    watching = asyncio.ensure_future(fleet._watch("w1", cast(Any, handle)))
    await asyncio.wait({watching}, timeout=0.05)
    assert calls == [("w0", "abort_groups_of", "w1")]
    watching.cancel()


def test_a_mask_is_looked_at_once_in_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at it waits for all that the device has been given."""
    looked, is_any = [], torch.Tensor.any

    def look(tensor: torch.Tensor) -> torch.Tensor:
        looked.append(tensor)
        return is_any(tensor)

    monkeypatch.setattr(torch.Tensor, "any", look)
    sharding = TokenSharding(cast(Any, SimpleNamespace(size=2, rank=0)))
    mask = torch.zeros(1, 1, 5, 5)
    for _ in range(40):
        sharding._check_mask(mask.view(1, 1, 5, 5), 2, True)
        sharding._check_mask(torch.zeros(1, 1, 1, 5), 2, True)  # of keys only
    assert len(looked) == 1
    sharding._check_mask(torch.zeros(1, 1, 5, 5), 2, True)
    assert len(looked) == 2


def test_nccl_aborts_what_fails_and_leaves_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Nccl:
        class Options:
            _timeout: Any = None

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            seen.extend((os.environ[ERROR_HANDLING], options._timeout.total_seconds(), rank, size))

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    for set_by_user, used in ((None, CLEAN_UP_ONLY), ("3", "3")):
        with monkeypatch.context() as patch:
            patch.setenv(ERROR_HANDLING, set_by_user or "")
            if set_by_user is None:
                patch.delenv(ERROR_HANDLING)
            seen.clear()
            CudaDevice(torch.device("cuda")).make_backend(None, 1, 2, 30.0)
            assert seen == [used, 30.0, 1, 2]
