"""What a request takes on a GPU, and what happens when it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from profiler.measure.memory import measure_peak_bytes
from tests.pipelines.models import make_inputs, model_folder
from tridentserve.device import find_device
from tridentserve.engine.live.weights.replica_store import MemoryBudget
from tridentserve.parallel import GroupCache, GroupMemory, connect_store
from tridentserve.pipelines import load_adapter
from tridentserve.stages import Stage

pytestmark = pytest.mark.gpu


def test_the_peak_is_seen(gpu: torch.device) -> None:
    held = torch.zeros(1 << 20, device=gpu)

    def work() -> None:
        torch.ones(3 << 20, device=gpu)

    assert measure_peak_bytes(work, {"held": held}, gpu) == 4 * (4 << 20)


def test_out_of_memory_leaves_the_adapter_usable(gpu: torch.device, tmp_path: Path) -> None:
    """A request that the GPU has no room for fails by itself: the next one gets the pixels that it always gets."""
    folder, inputs = model_folder("sd3", tmp_path), make_inputs()
    adapter = load_adapter(folder, frozenset(Stage), device=str(gpu))
    condition = adapter.encode(inputs)
    state = adapter.prepare(condition, inputs)
    expected = adapter.latents(adapter.step(state, state.num_steps))["latents"]
    free_bytes, _ = torch.cuda.mem_get_info(gpu)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * free_bytes, dtype=torch.uint8, device=gpu)
    torch.cuda.empty_cache()
    again = adapter.prepare(condition, inputs)
    assert torch.equal(adapter.latents(adapter.step(again, again.num_steps))["latents"], expected)


def test_a_group_is_measured_and_its_memory_is_not_given_to_weights(gpu: torch.device) -> None:
    """A group of one: what NCCL takes for peers, it cannot show."""
    device = find_device(gpu)
    held = torch.zeros(64 << 20, dtype=torch.uint8, device=gpu)
    before = device.measure_memory()
    assert before is not None
    assert 0 < before.outside_bytes < before.total_bytes - held.nbytes, "the context, and not the tensor"
    memory = GroupMemory(device)
    budget = MemoryBudget(before.total_bytes, 0, 0, memory.count_missing_bytes)
    assert budget.group_bytes == 0
    cache = GroupCache(connect_store(is_server=True), gpu, capacity=2, timeout_s=60.0, memory=memory)
    cache.acquire("alone", 0, 1, use=1)
    after = device.measure_memory()
    assert after is not None
    assert memory.largest_bytes >= 0
    assert budget.group_bytes == pytest.approx(after.outside_bytes + memory.largest_bytes, abs=64 << 20)
    assert budget.group_bytes >= before.outside_bytes
    cache.drop("alone")
