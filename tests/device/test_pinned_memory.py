"""Page-locked host memory: every register has its unregister, and a failed one leaves no error of CUDA behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.device.recording import CPU, OUT_OF_MEMORY, RecordingDevice, use_recording_device
from tridentserve.device import cuda_device, find_device, pinned_memory
from tridentserve.device.cuda_device import CudaDevice
from tridentserve.device.pinned_memory import PinnedMemory, find_file_system
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import Replica
from tridentserve.stages import Stage


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_each_pin_is_undone(in_memory: Path) -> None:
    device = RecordingDevice()
    owner, buffers = PinnedMemory(device), [torch.zeros(size, dtype=torch.uint8) for size in (10, 20)]
    for buffer in (*buffers, *buffers):
        assert owner.pin(buffer, in_memory / "weights.bin")
    assert sorted(device.registered.values()) == [10, 20]
    owner.unpin(buffers[0])
    owner.unpin(buffers[0])
    assert list(device.registered.values()) == [20]
    del owner
    assert not device.registered, "an owner that is dropped lets go as well"


def test_a_failed_pin_is_told(in_memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = RecordingDevice()
    device.error = OUT_OF_MEMORY
    owner, buffer = PinnedMemory(device), torch.zeros(10, dtype=torch.uint8)
    assert not owner.pin(buffer, in_memory / "weights.bin")
    assert "cannot be pinned (CUDA error 2)" in caplog.text
    owner.unpin(buffer)


class LatchingRuntime:
    """CUDA's calls that fail, and the error that stays until the next launch."""

    def __init__(self) -> None:
        self.latched = False

    def fail(self, *args: int) -> int:
        self.latched = True
        return OUT_OF_MEMORY

    def launch(self, *args: Any, **kwargs: Any) -> None:
        was_latched, self.latched = self.latched, False
        if was_latched:
            raise RuntimeError("CUDA error: out of memory")

    cudaHostRegister = cudaHostUnregister = fail  # noqa: N815


def test_a_failed_call_leaves_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, device, buffer = LatchingRuntime(), CudaDevice(torch.device("cuda")), torch.zeros(10, dtype=torch.uint8)
    monkeypatch.setattr(cuda_device, "_cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", runtime.launch)
    assert device.register_host_memory(buffer) == OUT_OF_MEMORY
    assert not runtime.latched
    assert device.unregister_host_memory(buffer.data_ptr()) == OUT_OF_MEMORY
    assert not runtime.latched


def test_files_on_a_disk_are_not_tried(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(pinned_memory, "_read_mounts", lambda: "/dev/vda / ext4 rw 0 0\ntmpfs /a\\040b tmpfs rw 0 0\n")
    device = RecordingDevice()
    assert not PinnedMemory(device).pin(torch.zeros(10, dtype=torch.uint8), Path("/data/host/weights.bin"))
    assert "in /data/host cannot be pinned, as it is on ext4" in caplog.text
    assert not device.registered
    assert (find_file_system(Path("/a b/c")), find_file_system(Path("/a bc"))) == ("tmpfs", "ext4")


def test_a_cpu_pins_nothing(in_memory: Path) -> None:
    assert not PinnedMemory(find_device(CPU)).pin(torch.zeros(10, dtype=torch.uint8), in_memory / "weights.bin")


def test_a_dropped_model_leaves_nothing_pinned(in_memory: Path, tiny_cache: Path) -> None:
    with use_recording_device() as device:
        copies = HostCopies(in_memory, {"flux": ModelSource("flux", ensure_tiny("flux", tiny_cache))}, CPU)
        buffer = copies.get(Replica("flux", Stage.DECODE)).buffer
        assert device.registered == {buffer.data_ptr(): buffer.numel()}
        copies.drop_model("flux")
        assert not device.registered
