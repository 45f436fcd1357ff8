"""Page-locked host memory: every register has its unregister, and a failed one leaves no error of CUDA behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.weights import pinned_memory
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.pinned_memory import PinnedMemory, find_file_system
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import Replica
from tridentserve.stages import Stage

GPU = torch.device("cuda")
OUT_OF_MEMORY = 2


class RecordingRuntime:
    """CUDA's calls as they come, and what is registered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registered: dict[int, int] = {}
        self.error = 0
        self.drained = 0
        monkeypatch.setattr(pinned_memory, "_cudart", lambda: self)
        monkeypatch.setattr(PinnedMemory, "_drain_error", lambda _: self._drain())

    def _drain(self) -> None:
        self.drained += 1

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert address not in self.registered
        if not self.error:
            self.registered[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> RecordingRuntime:
    return RecordingRuntime(monkeypatch)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_each_pin_is_undone(runtime: RecordingRuntime, in_memory: Path) -> None:
    owner, buffers = PinnedMemory(GPU), [torch.zeros(size, dtype=torch.uint8) for size in (10, 20)]
    for buffer in (*buffers, *buffers):
        assert owner.pin(buffer, in_memory / "weights.bin")
    assert sorted(runtime.registered.values()) == [10, 20]
    owner.unpin(buffers[0])
    owner.unpin(buffers[0])
    assert list(runtime.registered.values()) == [20]
    del owner
    assert not runtime.registered, "an owner that is dropped lets go as well"


def test_a_failed_pin_leaves_no_error(
    runtime: RecordingRuntime, in_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.error = OUT_OF_MEMORY
    owner, buffer = PinnedMemory(GPU), torch.zeros(10, dtype=torch.uint8)
    assert not owner.pin(buffer, in_memory / "weights.bin")
    assert runtime.drained == 1
    assert "cannot be pinned (CUDA error 2)" in caplog.text
    owner.unpin(buffer)


def test_files_on_a_disk_are_not_tried(
    runtime: RecordingRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinned_memory, "_read_mounts", lambda: "/dev/vda / ext4 rw 0 0\ntmpfs /a\\040b tmpfs rw 0 0\n")
    with caplog.at_level(logging.WARNING):
        assert not PinnedMemory(GPU).pin(torch.zeros(10, dtype=torch.uint8), Path("/data/host/weights.bin"))
    assert "in /data/host cannot be pinned, as it is on ext4" in caplog.text
    assert not runtime.registered
    assert not runtime.drained
    assert (find_file_system(Path("/a b/c")), find_file_system(Path("/a bc"))) == ("tmpfs", "ext4")


def test_a_cpu_pins_nothing(runtime: RecordingRuntime, in_memory: Path) -> None:
    assert not PinnedMemory(torch.device("cpu")).pin(torch.zeros(10, dtype=torch.uint8), in_memory / "weights.bin")
    assert not runtime.registered


def test_a_dropped_model_leaves_nothing_pinned(runtime: RecordingRuntime, in_memory: Path, tiny_cache: Path) -> None:
    copies = HostCopies(in_memory, {"flux": ModelSource("flux", ensure_tiny("flux", tiny_cache))}, GPU)
    buffer = copies.get(Replica("flux", Stage.DECODE)).buffer
    assert runtime.registered == {buffer.data_ptr(): buffer.numel()}
    copies.drop_model("flux")
    assert not runtime.registered
