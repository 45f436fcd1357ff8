"""Copies to and from a device: beside what it computes, after what they need, and never in the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.device.recording import CPU, RecordingDevice, use_recording_device
from tests.engine.live.handoff.test_handoff import DirectPeer
from tests.pipelines.models import make_inputs, model_folder
from tests.support.waiting import until
from tridentserve.device import find_device
from tridentserve.device.copy_thread import CopyThread
from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.transport.nixl_link import NixlLink
from tridentserve.engine.live.transport.parcel import Parcel, ParcelLayout
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.weights_loader import WeightsLoader
from tridentserve.engine.live.worker.denoising import StepControl
from tridentserve.engine.live.worker.executor import StageExecutor
from tridentserve.engine.live.worker.worker import WorkerParts
from tridentserve.plans import DispatchPlan, PlanMember, Replica
from tridentserve.stages import Stage

KEY = HandoffKey("request", 3)


@pytest.fixture
def device() -> Iterator[RecordingDevice]:
    with use_recording_device() as recording:
        yield recording


class RecordedStream:
    """A stream of CUDA, as far as a thread for copies uses it."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._calls.append("on its stream")

    def __exit__(self, *error: object) -> None:
        self._calls.append("off its stream")

    def synchronize(self) -> None:
        self._calls.append("wait for its stream")


@pytest.mark.parametrize("fails", [False, True])
async def test_a_copy_waits_on_its_own_stream_in_its_own_thread(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    recording, threads = RecordingDevice(), set()
    monkeypatch.setattr(recording, "make_stream", lambda: RecordedStream(recording.calls), raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)

    def copy(target: str) -> str:
        threads.add(threading.get_ident())
        recording.calls.append(f"copy to {target}")
        if fails:
            raise MemoryError
        return "copied"

    copies = CopyThread(cast(Any, recording), "test")
    outcome = (await asyncio.gather(copies(copy, "there", after=recording.mark_work()), return_exceptions=True))[0]
    assert isinstance(outcome, MemoryError) if fails else outcome == "copied"
    assert threading.get_ident() not in threads
    assert recording.calls == [
        "mark 1",
        "enter thread test_0",
        "on its stream",
        "wait for mark 1",
        "copy to there",
        "wait for its stream",
        "off its stream",
    ]


async def test_pushes_and_checkpoints_leave_the_event_loop_free(device: RecordingDevice) -> None:
    """While copies are held up, the loop answers; a copy waits for the work that made its tensors and no other."""
    slabs = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(2)]
    links = [NixlLink(f"copies-{name}", slab) for name, slab in zip("ab", slabs, strict=True)]
    for one, other in (links, links[::-1]):
        one.add_peer(other.address).result()
    peers = {name: DirectPeer(link) for name, link in zip("ab", links, strict=True)}
    for name, link, slab in zip("ab", links, slabs, strict=True):
        peers[name].buffer = HandoffBuffer(name, peers, slab, link)
    device.calls.clear()
    state, made = torch.arange(8.0), device.mark_work()
    device.held.clear()
    sending = asyncio.ensure_future(peers["a"].buffer.send_checkpoint(KEY, Parcel({"x": state}, made=made), "b"))
    device.mark_work()  # a later step, which the copy need not wait for
    await asyncio.wait({sending}, timeout=0.05)
    assert not sending.done()
    assert peers["b"].buffer.used_bytes == 0  # no slot waits for bytes that may take minutes to be there
    device.held.set()
    await sending
    kept = peers["b"].buffer.checkpoints.get(KEY)
    assert kept is not None
    assert torch.equal(kept.tensors["x"], state)
    assert device.calls == ["mark 1", "mark 2", "wait for mark 1", "copy", "copy", "hand over 1"]
    assert [peers[name].buffer.used_bytes for name in "ab"] == [0, 0]
    for link in links:
        link.close()


async def test_a_slot_that_is_being_read_is_not_given_to_others(device: RecordingDevice) -> None:
    """Its request may end meanwhile."""
    slab = torch.zeros(1 << 12, dtype=torch.uint8)
    link = NixlLink("reading", slab)
    buffer = HandoffBuffer("b", {}, slab, link)
    parcel = Parcel({"x": torch.arange(8.0)})
    offset = await buffer.reserve_slot(KEY, "a", parcel.layout())
    assert offset == 0
    parcel.pack_into(slab, parcel.layout())
    buffer._inbox._slots[KEY].arrived.cancel()
    buffer._inbox._slots[KEY].arrived = asyncio.get_running_loop().create_future()
    buffer._inbox._slots[KEY].arrived.set_result(None)
    device.held.clear()
    reading = asyncio.ensure_future(buffer._inbox.copy_out(KEY, CPU))
    await asyncio.sleep(0)
    buffer.forget_request(KEY.request_id, KEY.plan_id)
    assert buffer.used_bytes > 0
    device.held.set()
    assert torch.equal((await reading).tensors["x"], parcel.tensors["x"])
    assert buffer.used_bytes == 0
    link.close()


def has_fast_buffer(parcel: Parcel, device: RecordingDevice, nbytes: int) -> bool:
    """True when the tensors lie in the only memory that the device has made for fast copies, of so many bytes."""
    (buffer,) = device.host_buffers
    return buffer.nbytes == nbytes and parcel.tensors["x"].data_ptr() == buffer.data_ptr()


def test_tensors_are_packed_into_memory_that_is_fast_to_copy_to(device: RecordingDevice) -> None:
    parcel = Parcel({"x": torch.arange(8.0)})
    packed = Parcel.views(parcel.pack(parcel.layout()), parcel.layout())
    assert torch.equal(packed.tensors["x"], parcel.tensors["x"])
    assert has_fast_buffer(packed, device, parcel.layout().nbytes)


async def test_what_leaves_a_slot_for_the_host_comes_into_memory_that_is_fast_to_copy_to() -> None:
    slab, parcel = torch.zeros(1 << 12, dtype=torch.uint8), Parcel({"x": torch.arange(8.0)})
    link = NixlLink("leaving", slab)
    with use_recording_device() as device:
        inbox = HandoffBuffer("b", {}, slab, link)._inbox
    assert inbox.reserve_slot(KEY, "a", parcel.layout()) == 0
    parcel.pack_into(slab, parcel.layout())
    inbox._slots[KEY].arrived = asyncio.get_running_loop().create_future()
    inbox._slots[KEY].arrived.set_result(None)
    copied = await inbox.copy_out(KEY, CPU)  # which is the host again
    assert torch.equal(copied.tensors["x"], parcel.tensors["x"])
    assert has_fast_buffer(copied, device, parcel.layout().nbytes)
    link.close()


async def test_what_comes_through_rays_store_is_copied_into_memory_that_is_fast_to_copy_from(
    device: RecordingDevice,
) -> None:
    delivered: list[Parcel] = []

    async def deliver_parcel(key: HandoffKey, layout: ParcelLayout, buffer: torch.Tensor) -> None:
        delivered.append(Parcel.views(buffer, layout))

    options, handoff = SimpleNamespace(torch_device="cpu"), SimpleNamespace(deliver_parcel=deliver_parcel)
    worker = SimpleNamespace(config=SimpleNamespace(options=options), handoff=handoff)
    layout = Parcel({"x": torch.arange(8.0)}).layout()
    came = np.arange(8, dtype=np.float32).view(np.uint8)
    await WorkerParts.deliver_parcel(cast(Any, worker), KEY, layout, came)
    assert torch.equal(delivered[0].tensors["x"], torch.arange(8.0))
    assert has_fast_buffer(delivered[0], device, came.nbytes)


async def test_weights_come_beside_what_computes(device: RecordingDevice, tmp_path: Path) -> None:
    """The thread that computes only opens the host copy, at most: a plan that runs there holds no load up."""
    folder, replica = model_folder("sd3", tmp_path), Replica("m", Stage.DECODE)
    copies = HostCopies(tmp_path / "host", {"m": ModelSource("m", folder)}, CPU)
    loader = WeightsLoader(copies, CPU, "host", 100_000, None, {}, 0)
    opened = loader.open(replica)
    device.held.clear()
    loading = asyncio.ensure_future(loader.load(replica, opened))
    await asyncio.wait({loading}, timeout=0.05)
    assert not loading.done()
    device.held.set()
    await until(loading.done)
    assert torch.equal(loading.result().buffer, opened.copy.buffer)
    # Neither peers nor computations may meet what is still under way in the new memory.
    assert device.calls == ["copy", "hand over 1", "wait for work", "copy", "wait for work"]


def test_stages_end_when_the_device_has_done_their_work(device: RecordingDevice, tmp_path: Path) -> None:
    folder = model_folder("sd3", tmp_path)
    from tests.engine.live.previews.test_previews import HeldStages

    executor = StageExecutor("w", cast(Any, HeldStages(folder)), cast(Any, None), find_device(CPU))
    stages, steps = (Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE), (0, 2)
    plan = DispatchPlan(0, "m", stages, ("w",), (PlanMember("r", steps),))
    execution = executor.execute_plan(plan, {"r": make_inputs(16, 16, 2, variant="sd3")}, {}, StepControl())
    assert [span.stage for span in execution.spans] == list(stages)
    assert device.calls == ["wait for work"] * 6
