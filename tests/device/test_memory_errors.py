"""Memory that runs out although the budget had it: less at once, then room for the next try."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.device.recording import CPU, RecordingDevice, use_recording_device
from tests.pipelines.models import make_inputs
from tridentserve.cluster import WorkerSpec
from tridentserve.device.cuda_device import CudaDevice
from tridentserve.device.memory_errors import describe_out_of_memory, is_out_of_memory
from tridentserve.engine.live.messages import ExpectedPeak, WorkerConfig
from tridentserve.engine.live.transport.nixl_link import NixlLink
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.worker.denoising import StepControl
from tridentserve.engine.live.worker.executor import Execution, StageExecutor
from tridentserve.engine.live.worker.plan_memory import RunningPlan
from tridentserve.engine.live.worker.plan_runner import PlanRunner
from tridentserve.engine.live.worker.reporting.plan_reports import PlanReporter
from tridentserve.engine.live.worker.worker import _start_link
from tridentserve.engine.options import Transport, WorkerOptions
from tridentserve.errors import ConfigError, GroupError, OutOfMemoryError, WorkerError
from tridentserve.models.decoded_outputs import DecodedOutputs
from tridentserve.pipelines.lora.lora_cache import LoraCache
from tridentserve.plans import DispatchPlan, PlanMember, Replica
from tridentserve.stages import Stage

MESSAGE = "CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 8 GiB. Advice follows."
INPUTS = make_inputs()


class SmallMemory:
    """A stage of a model on a device that has room for one prompt, and for tiles."""

    def __init__(self, fails_in_tiles: bool = False) -> None:
        self.asked: list[Any] = []
        self.loras = LoraCache()
        self._fails_in_tiles = fails_in_tiles

    def encode_all(self, requests: list[Any]) -> list[dict[str, torch.Tensor]]:
        self.asked.append(len(requests))
        if len(requests) > 1:
            raise torch.OutOfMemoryError(MESSAGE)
        return [{"x": torch.ones(1)}]

    def decode_outputs(self, latents: Any, inputs: Any, tile: Any) -> DecodedOutputs:
        self.asked.append("tiles" if tile else "whole")
        if tile is None or self._fails_in_tiles:
            raise torch.OutOfMemoryError(MESSAGE)
        return DecodedOutputs(np.zeros(1, np.uint8))

    @contextmanager
    def use(self, replica: Replica, group: object) -> Iterator[SmallMemory]:
        yield self


def run(stage: Stage, memory: SmallMemory, device: RecordingDevice, frugal: bool = False) -> Execution:
    executor = StageExecutor("w", cast(Any, memory), cast(Any, None), device)
    names = "abc" if stage is Stage.ENCODE else "a"
    plan = DispatchPlan(0, "m", (stage,), ("w",), tuple(PlanMember(name) for name in names))
    incoming = {} if stage is Stage.ENCODE else {"a": Parcel({"latents": torch.ones(1)})}
    return executor.execute_plan(plan, dict.fromkeys(names, INPUTS), incoming, StepControl(), frugal)


def test_prompts_are_encoded_one_by_one_then() -> None:
    memory, device = SmallMemory(), RecordingDevice()
    assert set(run(Stage.ENCODE, memory, device).outputs) == set("abc")
    assert memory.asked == [3, 1, 1, 1]
    assert device.calls.count("free cached memory") == 1


def test_images_are_decoded_in_tiles_then() -> None:
    memory, device = SmallMemory(), RecordingDevice()
    execution = run(Stage.DECODE, memory, device)
    assert execution.tiled
    assert set(execution.decoded) == {"a"}
    assert memory.asked == ["whole", "tiles"]
    assert [span.stage for span in execution.spans] == [Stage.DECODE]


@pytest.mark.parametrize("frugal", [False, True])
def test_it_is_not_tried_a_third_time(frugal: bool) -> None:
    memory = SmallMemory(fails_in_tiles=True)
    with pytest.raises(torch.OutOfMemoryError):
        run(Stage.DECODE, memory, RecordingDevice(), frugal)
    assert memory.asked == (["tiles"] if frugal else ["whole", "tiles"])


class RecordedReplicas:
    """The replicas of a worker, as its plans ask for them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.asked: list[tuple[Any, int]] = []  # to load ahead, beside so many bytes
        self.fails = self.ahead_bytes = 0

    async def prepare(self, needed: Any, peak_bytes: int, *_: Any) -> None:
        self.calls.append(("prepare", peak_bytes))
        if self.fails:
            self.fails -= 1
            raise torch.OutOfMemoryError(MESSAGE)

    def load_ahead(self, needed: Any, peak_bytes: int, loras: Any) -> None:
        self.asked.append((needed, peak_bytes))

    async def evict_all_but(self, queued: Any) -> None:
        self.calls.append(("evict all but", set(queued)))


class RecordedPeak:
    total_bytes = 0
    growth_bytes = 900

    def begin(self) -> None: ...

    def end(self) -> None: ...


def make_running(plan_id: int, needed: tuple[Replica, ...] = ()) -> RunningPlan:
    plan = DispatchPlan(plan_id, "m", (Stage.DECODE,), ("w",), (PlanMember("a"),))
    peak: list[Any] = [ExpectedPeak(500, 300), needed, cast(Any, None), RecordedPeak()]
    return RunningPlan(plan, {"a": INPUTS}, StepControl(), *peak)


def make_runner(replicas: RecordedReplicas, executor: Any) -> PlanRunner:
    async def at_once(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    absent = cast(Any, None)
    return PlanRunner(
        worker_id="w",
        device=CPU,
        device_thread=cast(Any, at_once),
        order=absent,
        executor=executor,
        replicas=cast(Any, replicas),
        host_copies=absent,
        handoff=absent,
        painter=absent,
        metrics=absent,
        reporter=PlanReporter("w", handoff=absent, metrics=absent),
    )


async def test_a_plan_that_found_no_memory_makes_room_and_the_next_one_expects_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Executor:
        def execute_plan(self, *args: Any) -> Execution:
            raise torch.OutOfMemoryError(MESSAGE)

    replicas, waiting = RecordedReplicas(), Replica("m", Stage.ENCODE)
    runner = make_runner(replicas, Executor())
    runner._running = {0: make_running(0), 1: make_running(1, (waiting,))}
    monkeypatch.setattr(runner, "_collect_inputs", lambda *_: {})
    with pytest.raises(WorkerError, match=r"memory ran out on w: CUDA out of memory. Tried to allocate 9.00 GiB$"):
        await runner._compute(runner._running[0], {}, False)
    assert replicas.calls == [("evict all but", {waiting})]
    await runner._memory.load(make_running(2), ())
    assert replicas.calls[1:] == [("prepare", 900)], "as much as was seen, not the 500 that were expected"


async def test_a_load_that_found_no_memory_is_tried_again_in_an_empty_one() -> None:
    replicas = RecordedReplicas()
    replicas.fails = 1
    assert await make_runner(replicas, None)._memory.load(make_running(0), ()) is False
    assert [name for name, _ in replicas.calls] == ["prepare", "evict all but", "prepare"]
    replicas.fails = 2
    with pytest.raises(torch.OutOfMemoryError):
        await make_runner(replicas, None)._memory.load(make_running(0), ())


def test_errors_of_the_allocators_are_known() -> None:
    of_cpu = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
    assert all(is_out_of_memory(error) for error in (MemoryError(), torch.OutOfMemoryError(MESSAGE), of_cpu))
    others = (OutOfMemoryError("planned"), RuntimeError("shape"), GroupError("a member died"), None)
    assert not any(is_out_of_memory(error) for error in others)
    assert describe_out_of_memory(MemoryError()) == "MemoryError"


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/ for more.",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
        "2.29.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes",
    ],
)
def test_errors_of_cuda_and_its_libraries_are_known(message: str) -> None:
    error = torch.AcceleratorError(message)
    assert is_out_of_memory(error)
    assert is_out_of_memory(RuntimeError(message))
    of_group = GroupError("cannot make group 'g' as rank 0 of 2")
    of_group.__cause__ = error
    assert is_out_of_memory(of_group)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
        "CUDA error: uncorrectable ECC error encountered",
        "NCCL error: ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 719 'unspecified "
        "launch failure'",
    ],
)
def test_others_are_not_taken_for_them(message: str) -> None:
    assert not is_out_of_memory(torch.AcceleratorError(message))


@pytest.mark.parametrize(
    ("setting", "is_in_the_way"),
    [("expandable_segments:True", True), ("max_split_size_mb:64,expandable_segments : true", True), ("", False)],
)
def test_expandable_segments_are_in_the_way_of_nixl(
    monkeypatch: pytest.MonkeyPatch, setting: str, is_in_the_way: bool
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, setting)
            found = CudaDevice(torch.device("cuda")).find_nixl_obstacle()
            assert found == (f"{name} with expandable_segments" if is_in_the_way else None)


def test_a_worker_that_they_are_in_the_way_of_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(transport: Transport) -> NixlLink | None:
        options = WorkerOptions(handoff_transport=transport)
        config = WorkerConfig(WorkerSpec("w", "node", 1), 0, "", frozenset(), {}, {}, "", 0, options=options)
        return _start_link(config, torch.zeros(64, dtype=torch.uint8))

    with use_recording_device() as device:
        monkeypatch.setattr(device, "find_nixl_obstacle", lambda: "THE_SETTING with expandable_segments")
        with pytest.raises(ConfigError, match="under THE_SETTING with expandable_segments: unset it, or use"):
            start("nixl")
        assert start("host") is None


class HeldPlan:
    """A plan that computes on a worker until it may end."""

    def __init__(self) -> None:
        self.replicas, self._goes_on = RecordedReplicas(), asyncio.Event()
        computes = self._computes = asyncio.Event()

        async def execute(*_: Any) -> Execution:
            computes.set()
            await self._goes_on.wait()
            return Execution()

        self.runner = make_runner(self.replicas, SimpleNamespace(execute_plan=None))
        cast(Any, self.runner)._device_thread, cast(Any, self.runner)._collect_inputs = execute, lambda *_: {}
        self.running = self.runner._running[0] = make_running(0)

    async def __aenter__(self) -> HeldPlan:
        self._computing = asyncio.ensure_future(self.runner._compute(self.running, {}, False))
        await self._computes.wait()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._goes_on.set()
        await self._computing


async def test_the_next_plan_has_its_weights_loaded_beside_the_one_that_computes() -> None:
    """Before it has the worker, with room for what the other one computes."""
    async with HeldPlan() as held:
        assert held.replicas.asked == []
        held.runner._running[1] = make_running(1, (Replica("m", Stage.ENCODE),))
        held.runner._running[2] = make_running(2, (Replica("m", Stage.DIFFUSE),))
        held.runner._load_ahead()
        assert held.replicas.asked == [((Replica("m", Stage.ENCODE),), 500)]


async def test_nothing_is_loaded_ahead_for_a_plan_that_was_stopped() -> None:
    async with HeldPlan() as held:
        held.runner._running[1] = make_running(1, (Replica("m", Stage.ENCODE),))
        held.runner._running[2] = make_running(2, (Replica("m", Stage.DIFFUSE),))
        held.runner._running[1].control.ask_to_stop()
        held.runner._load_ahead()
        assert held.replicas.asked == [((Replica("m", Stage.DIFFUSE),), 500)]
