"""Times one stage at one size with a real pipeline: what runs inside each process of the profiler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import safetensors.torch
import torch

from profiler.measure_memory import peak_bytes
from tridentserve.parallel import SequenceGroup, connect_store, make_group, sequence_parallel
from tridentserve.pipelines import PipelineAdapter, load_adapter
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

WARM_UP = 2
_GROUP_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Source:
    """The model to measure, and on what: `device` as torch names it, `dtype` as torch names it or None."""

    folder: Path
    device: str
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group that finds its others in a store on this machine."""

    store_port: int
    group: str
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The median of the timed runs, the peak of one, and the bytes of what the stage hands on (one output)."""

    seconds: float
    peak_bytes: int
    output_bytes: int


@lru_cache(maxsize=4)
def _adapter(source: Source, stage: Stage) -> PipelineAdapter:
    dtype = getattr(torch, source.dtype) if source.dtype else None
    return load_adapter(source.folder, frozenset({stage}), device=source.device, dtype=dtype)


def set_threads(num_threads: int) -> None:
    """As many torch threads as a worker has. Also the initializer of the profiler's processes."""
    torch.set_num_threads(num_threads)


def sample_encode(source: Source, inputs: GenerationInputs, repeats: int) -> tuple[Sample, bytes]:
    """ENCODE, and the condition it gives, as safetensors bytes that other processes can take."""
    adapter, device = _adapter(source, Stage.ENCODE), torch.device(source.device)
    seconds = _median_s(lambda: adapter.encode(inputs), repeats, device)
    peak = peak_bytes(lambda: adapter.encode(inputs), {}, device)
    condition = {name: tensor.cpu().contiguous() for name, tensor in adapter.encode(inputs).items()}
    return Sample(seconds, peak, _num_bytes(condition)), safetensors.torch.save(condition)


def sample_diffuse(
    source: Source, inputs: GenerationInputs, condition: bytes, repeats: int, member: Member | None = None
) -> Sample:
    """One denoising step; with `member`, as one rank of a group whose others call the same.

    Every step begins with the agreement to go on, as it does when a worker runs a plan.
    """
    adapter, device = _adapter(source, Stage.DIFFUSE), torch.device(source.device)
    group = _join(member, device) if member is not None else None
    try:
        state = adapter.prepare(safetensors.torch.load(condition), inputs)

        def step() -> None:
            nonlocal state
            if group is not None:
                group.agree()
            state = adapter.step(state)

        with _parallel(group):
            seconds = _median_s(step, repeats, device)
            peak = peak_bytes(step, state.tensors, device)
        return Sample(seconds, peak, _num_bytes(adapter.latents(state)))
    finally:
        if group is not None:
            group.close()


def num_steps(repeats: int) -> int:
    """Denoising steps that `sample_diffuse` takes: warm-up, timed, and one to watch the memory. A request of so many
    has its latents then."""
    return WARM_UP + repeats + 1


def sample_decode(source: Source, inputs: GenerationInputs, condition: bytes, repeats: int) -> Sample:
    """DECODE, of the latents after a single step: its cost does not depend on what they show."""
    diffuse, adapter = _adapter(source, Stage.DIFFUSE), _adapter(source, Stage.DECODE)
    device = torch.device(source.device)
    latents = diffuse.latents(diffuse.step(diffuse.prepare(safetensors.torch.load(condition), inputs)))
    seconds = _median_s(lambda: adapter.decode(latents, inputs), repeats, device)
    peak = peak_bytes(lambda: adapter.decode(latents, inputs), latents, device)
    return Sample(seconds, peak, adapter.decode(latents, inputs).nbytes)


def _num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _median_s(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median of `repeats` runs after the warm-up."""
    times_s = []
    for number in range(WARM_UP + repeats):
        start_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= WARM_UP:
            times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


def _join(member: Member, device: torch.device) -> SequenceGroup:
    store = connect_store(port=member.store_port, timeout_s=_GROUP_TIMEOUT_S)
    return make_group(store, member.group, member.rank, member.size, device, _GROUP_TIMEOUT_S)


def _parallel(group: SequenceGroup | None) -> AbstractContextManager[None]:
    return nullcontext() if group is None else sequence_parallel(group)
