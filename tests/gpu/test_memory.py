"""What a request takes on a GPU, and what happens when it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from profiler.measure.memory import measure_peak_bytes
from tests.pipelines.models import make_inputs, model_folder
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
