"""Weights on their way to a GPU: page-locked host memory, errors of CUDA that nobody must find later, exact bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.pipelines.models import formats_of, make_inputs, model_folder
from tridentserve.device import find_device
from tridentserve.device.pinned_memory import PinnedMemory, find_file_system
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.replica_store import MemoryBudget, ReplicaStore
from tridentserve.engine.live.weights.weights_loader import WeightsLoader
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.weights import named_tensors
from tridentserve.plans import Replica
from tridentserve.stages import Stage
from tridentserve.weights_share import WHOLE, WeightsShare

pytestmark = pytest.mark.gpu
SHARED_MEMORY = Path("/dev/shm")
NBYTES = 8 << 20


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield Path(folder)


def map_file(path: Path, nbytes: int = NBYTES) -> torch.Tensor:
    path.write_bytes(bytes(range(256)) * (nbytes // 256))
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def is_pinned(buffer: torch.Tensor) -> bool:
    """True when CUDA refuses to register the memory, as it has it already."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    refused = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)) != 0
    if refused:
        with pytest.raises(RuntimeError, match="already"):
            torch.zeros(1, device="cuda")
    else:
        assert int(cudart.cudaHostUnregister(buffer.data_ptr())) == 0
    return refused


def test_an_error_of_cuda_waits_for_the_next_launch(gpu: torch.device) -> None:
    """The reason for which failed pins are drained: if this fails, CUDA or torch no longer need it."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    assert int(cudart.cudaHostUnregister(torch.zeros(4096).data_ptr())) != 0
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.zeros(1, device=gpu)
    assert torch.zeros(1, device=gpu).item() == 0


def test_files_in_memory_are_pinned_and_let_go(gpu: torch.device, in_memory: Path) -> None:
    pinned, buffer = PinnedMemory(find_device(gpu)), map_file(in_memory / "weights.bin")
    assert pinned.pin(buffer, in_memory / "weights.bin")
    assert is_pinned(buffer)
    assert torch.equal(buffer.to(gpu).cpu(), buffer)
    pinned.unpin(buffer)
    assert not is_pinned(buffer)
    pinned.unpin(buffer)


def test_an_owner_that_is_dropped_lets_go(gpu: torch.device, in_memory: Path) -> None:
    owner, buffer = PinnedMemory(find_device(gpu)), map_file(in_memory / "weights.bin")
    owner.pin(buffer, in_memory / "weights.bin")
    del owner
    assert not is_pinned(buffer)


def test_a_pin_that_fails_leaves_no_error_behind(
    gpu: torch.device, in_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pinned, buffer = PinnedMemory(find_device(gpu)), map_file(in_memory / "weights.bin")
    others = PinnedMemory(find_device(gpu))
    assert others.pin(buffer, in_memory / "weights.bin")
    with caplog.at_level(logging.WARNING):
        assert not pinned.pin(buffer, in_memory / "weights.bin"), "registered already"
    assert "cannot be pinned (CUDA error" in caplog.text
    assert torch.zeros(1, device=gpu).item() == 0
    others.unpin(buffer)


def test_a_file_on_a_disk_is_not_pinned(gpu: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if find_file_system(tmp_path) == "tmpfs":
        pytest.skip("the tests' directory is in memory")
    buffer = map_file(tmp_path / "weights.bin")
    with caplog.at_level(logging.WARNING):
        assert not PinnedMemory(find_device(gpu)).pin(buffer, tmp_path / "weights.bin")
    assert "name a directory in memory" in caplog.text
    assert torch.equal(buffer.to(gpu).cpu(), buffer)


async def at_once(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@pytest.mark.parametrize("place", ["memory", "disk"])
async def test_a_loaded_replica_has_the_bytes_of_the_model_folder(
    gpu: torch.device, in_memory: Path, tmp_path: Path, place: str
) -> None:
    source = ModelSource("flux", model_folder("flux", tmp_path / "model"))
    host = HostCopies(in_memory if place == "memory" else tmp_path / "host", {"flux": source}, gpu)
    loader = WeightsLoader(host, gpu, "host", 100_000, None, {}, 0)
    store = ReplicaStore(host, gpu, MemoryBudget(1 << 30, 1000, 0), at_once, loader, None)
    for stage in Stage:
        await store.prepare((Replica("flux", stage),))
        expected = named_tensors(
            load_adapter(source.folder, frozenset({stage}), formats=formats_of(source.folder, device="cuda"))
        )
        got = named_tensors(store.adapter(Replica("flux", stage)))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name].cpu(), tensor) for name, tensor in expected.items())
        assert all(tensor.is_cuda for tensor in got.values())


def test_a_dropped_model_leaves_nothing_pinned(gpu: torch.device, in_memory: Path, tmp_path: Path) -> None:
    source = ModelSource("flux", model_folder("flux", tmp_path))
    host = HostCopies(in_memory, {"flux": source}, gpu)
    buffer = host.get(Replica("flux", Stage.DECODE)).buffer
    assert is_pinned(buffer)
    host.drop_model("flux")
    assert not is_pinned(buffer)


@pytest.mark.parametrize("place", ["memory", "disk"])
async def test_streamed_layers_compute_what_whole_weights_compute(
    gpu: torch.device, in_memory: Path, tmp_path: Path, place: str
) -> None:
    """Copies on a stream of their own, into slots that computations in flight still read."""
    source, diffuse = ModelSource("flux", model_folder("flux", tmp_path / "model")), Replica("flux", Stage.DIFFUSE)
    host = HostCopies(in_memory if place == "memory" else tmp_path / "host", {"flux": source}, gpu)
    inputs = make_inputs(variant="flux")
    encoder = load_adapter(
        source.folder, frozenset({Stage.ENCODE}), device=str(gpu), formats=formats_of(source.folder, device="cuda")
    )
    condition = encoder.encode(inputs)
    latents = []
    for share in (WHOLE, WeightsShare(streamed=True)):
        loader = WeightsLoader(host, gpu, "host", 100_000, None, {diffuse: share}, 0)
        store = ReplicaStore(host, gpu, MemoryBudget(1 << 30, 1000, 0), at_once, loader, None)
        await store.prepare((diffuse,))
        with store.use(diffuse, None) as adapter:
            state = adapter.prepare(condition, inputs)
            latents.append(adapter.step(state, state.num_steps).tensors["latents"].cpu())
    assert torch.equal(*latents)
