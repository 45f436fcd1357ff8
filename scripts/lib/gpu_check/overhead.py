"""The memory that a process holds on a GPU outside of torch's allocator: the context of CUDA, the code of kernels, the
workspaces of libraries. It is what a worker's budget must leave free. Nobody else may use the GPU meanwhile."""

from __future__ import annotations

from pathlib import Path

import torch

from profiler.measure.random_weights import write_published
from profiler.measure.stages import (
    Source,
    build_inputs,
    compute_condition,
    count_steps,
    sample_decode,
    sample_diffuse,
    sample_encode,
)
from tridentserve.requests import Shape

# Models of full width and few blocks: what a block leaves behind, the next one of its kind leaves behind too.
_MODELS = (("flux.1-dev", Shape(1024, 1024)), ("wan2.1-1.3b", Shape(480, 832, 33)))
_MOST_BLOCKS = 2


def measure_overhead_bytes(folder: Path) -> dict[str, int]:
    """Bytes outside of the allocator when CUDA has begun and after all stages of each model, and those that it keeps
    then without a tensor in them. Makes files in `folder`."""
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    found = {"begun": _count_outside(device)}
    for model, shape in _MODELS:
        source = Source(
            write_published(model, folder / model, most_blocks=_MOST_BLOCKS, few_text_layers=True),
            device="cuda",
            random_weights=True,
        )
        inputs = build_inputs(source, shape, count_steps(1))
        sample_encode(source, inputs, 1)
        condition = compute_condition(source, inputs)
        sample_diffuse(source, inputs, condition, 1)
        sample_decode(source, inputs, condition, 1)
        found[f"after_{model}"] = _count_outside(device)
        found[f"reserved_after_{model}"] = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return found


def _count_outside(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device)
