"""Times one stage at one size with a real pipeline: what runs inside each process of the profiler."""

from __future__ import annotations

import gc
import io
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image

from profiler.measure.memory import measure_peak_bytes
from profiler.measure.random_weights import make_random_adapter
from tridentserve.device import find_device, free_cached_memory
from tridentserve.models.family import Family
from tridentserve.models.kernels import Kernels
from tridentserve.models.model_folder import detect_family, read_family
from tridentserve.models.number_formats import NumberFormat, NumberFormats, find_formats
from tridentserve.parallel import connect_store, make_group, sequence_parallel
from tridentserve.parallel.groups import SequenceGroup
from tridentserve.pipelines import PipelineAdapter, kernels, load_adapter
from tridentserve.pipelines.adapters.whole import WholeAdapter
from tridentserve.process.heap import keep_freed_memory
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

WARM_UP = 2
_GROUP_TIMEOUT_S = 120.0
_PROMPT = "a lighthouse on a cliff above the sea at dawn, seen from a small boat, oil on canvas"


@dataclass(frozen=True, slots=True)
class Source:
    """The model to measure, and the device to measure it on."""

    folder: Path
    """The model folder."""
    device: str
    """The device as torch names it."""
    formats: NumberFormats = field(default_factory=NumberFormats)
    """The number formats that are asked for."""
    random_weights: bool = False
    """True when only the configurations in `folder` are read, and weights are random."""
    condition_folder: Path | None = None
    """A cheaper model of random weights whose conditions have the same shape, for when ENCODE is not measured."""
    kernels: Kernels = field(default_factory=Kernels)
    """The attention kernel, and compilation."""
    guidance_scale: float | None = None
    """The guidance scale of the measured requests. None: the default of the family."""

    def find_formats(self) -> Mapping[str, NumberFormat]:
        """The number format of each component."""
        return find_formats(read_family(self.folder), self.formats, self.device)


@dataclass(frozen=True, slots=True)
class MeasuredMember:
    """One rank of a group that finds its others in a store on this machine."""

    store_port: int
    group: str
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one measured point."""

    seconds: float
    """The median of the timed runs, in seconds."""
    spread: float
    """Their interquartile range, relative to the median."""
    peak_bytes: int
    """The peak of the activations in one run, in bytes."""
    output_bytes: int
    """Bytes of what the stage hands on, of all outputs together."""


# The adapter in this process's memory: stages are measured one after another, each with the device to itself.
_held: dict[tuple[Source, Stage], PipelineAdapter] = {}


def load_stage(source: Source, stage: Stage) -> PipelineAdapter:
    """One stage with its weights, as it is served but for the kernels."""
    load = make_random_adapter if source.random_weights else load_adapter
    return load(source.folder, frozenset({stage}), device=source.device, formats=source.find_formats())


def load_weightless(source: Source) -> PipelineAdapter:
    """Stage D without its weights: it can prepare requests, and cannot run them."""
    return load_adapter(
        source.folder,
        frozenset({Stage.DIFFUSE}),
        device=source.device,
        formats=source.find_formats(),
        weights=False,
    )


def _load_adapter(source: Source, stage: Stage) -> PipelineAdapter:
    if (source, stage) not in _held:
        release()
        adapter = load_stage(source, stage)
        kernels.install(adapter, source.kernels)
        _held[source, stage] = adapter
    return _held[source, stage]


_weightless = lru_cache(maxsize=1)(load_weightless)


def release() -> None:
    """Let go of the models in this process."""
    _held.clear()
    gc.collect()
    free_cached_memory()


def set_up_process(num_threads: int) -> None:
    """Let this process compute as a worker does: with its number of torch threads, and its use of freed memory."""
    torch.set_num_threads(num_threads)
    keep_freed_memory()


def build_inputs(source: Source, shape: Shape, steps: int) -> GenerationInputs:
    """The request that is measured, with an image of noise where the family starts from one."""
    family = detect_family(source.folder)
    image = _make_noise(shape) if family.needs_image else None
    scale = family.default_guidance_scale if source.guidance_scale is None else source.guidance_scale
    mask = image if family.takes_mask else None  # noise in each channel makes grey noise
    return GenerationInputs(_PROMPT, shape, steps, scale, seed=0, image=image, mask=mask)


@lru_cache(maxsize=1)
def _make_noise(shape: Shape) -> bytes:
    """A PNG file in the size of the output, as most images are that a service is sent."""
    pixels = np.random.default_rng(0).integers(0, 256, (shape.height, shape.width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def compute_condition(source: Source, inputs: GenerationInputs, cheap: bool = False) -> bytes:
    """A condition of the request, as safetensors bytes that other processes can take; `cheap`: of the source's
    `condition_folder`, if it has one."""
    if cheap and source.condition_folder is not None:
        release()
        adapter = make_random_adapter(
            source.condition_folder, frozenset({Stage.ENCODE}), source.device, source.find_formats()
        )
    else:
        adapter = _load_adapter(source, Stage.ENCODE)
    condition: bytes = safetensors.torch.save(
        {name: tensor.cpu().contiguous() for name, tensor in adapter.encode(inputs).items()}
    )
    return condition


def sample_encode(source: Source, inputs: GenerationInputs, repeats: int, batch: int = 1) -> Sample:
    """ENCODE of `batch` requests together."""
    adapter, device = _load_adapter(source, Stage.ENCODE), torch.device(source.device)
    requests = [inputs] * batch
    timed = _time_run(lambda: adapter.encode_all(requests), repeats, device)
    peak = measure_peak_bytes(lambda: adapter.encode_all(requests), {}, device)
    return Sample(*timed, peak, sum(_count_bytes(condition) for condition in adapter.encode_all(requests)))


def sample_diffuse(
    source: Source,
    inputs: GenerationInputs,
    condition: bytes,
    repeats: int,
    batch: int = 1,
    member: MeasuredMember | None = None,
) -> Sample:
    """One denoising step of `batch` requests; with `member`, as one rank of a group whose others call the same.

    Every step begins with the agreement to continue, as it does when a worker runs a plan.
    """
    adapter, device = _load_adapter(source, Stage.DIFFUSE), torch.device(source.device)
    if isinstance(adapter, WholeAdapter):
        return _sample_whole(adapter, replace(inputs, num_outputs=batch), detect_family(source.folder), device)
    with _join_group(member, device) as group, sequence_parallel(group):
        states = [adapter.prepare(safetensors.torch.load(condition), inputs) for _ in range(batch)]

        def step() -> None:
            nonlocal states
            if group is not None:
                group.agree()
            states = adapter.advance(states)

        timed = _time_run(step, repeats, device)
        held = {
            f"{index}.{name}": tensor for index, state in enumerate(states) for name, tensor in state.tensors.items()
        }
        peak = measure_peak_bytes(step, held, device)
        return Sample(*timed, peak, sum(_count_bytes(adapter.latents(state)) for state in states))


def _sample_whole(adapter: WholeAdapter, inputs: GenerationInputs, family: Family, device: torch.device) -> Sample:
    """A denoising step of a request for `inputs.num_outputs` that is served whole, with the part of what comes before
    the first step and after the last one that a step has in a request of the default number of steps."""
    marks_s: list[float] = []

    def mark(share: float = 0.0) -> None:
        find_device(device).wait_for_all_work()
        marks_s.append(time.perf_counter())

    short = replace(inputs, num_inference_steps=WARM_UP)
    peak = measure_peak_bytes(lambda: adapter.generate(short, lambda share: None), {}, device)  # it warms up, too
    mark()
    pixels = adapter.generate(inputs, mark)
    mark()
    first_s, *steps_s, last_s = (end_s - begin_s for begin_s, end_s in itertools.pairwise(marks_s))
    # Some schedulers run the model twice for each step, and some once more in all.
    runs = max(1, round((len(steps_s) + 1) / inputs.num_inference_steps))
    run_s = statistics.median(steps_s or [first_s])
    around_s = max(0.0, first_s - run_s) + last_s
    spread = (max(steps_s) - min(steps_s)) / run_s if steps_s else 0.0
    return Sample(runs * run_s + around_s / family.default_steps, spread, peak, pixels.nbytes)


def count_steps(repeats: int) -> int:
    """Denoising steps that `sample_diffuse` takes: warm-up, timed, and one to watch the memory. A request of this
    many steps has its latents then."""
    return WARM_UP + repeats + 1


def sample_decode(
    source: Source,
    inputs: GenerationInputs,
    condition: bytes,
    repeats: int,
    batch: int = 1,
    member: MeasuredMember | None = None,
) -> Sample:
    """DECODE of the noise that DIFFUSE would begin with, of `batch` outputs: its cost does not depend on what they
    show. With `member`, as one rank of a group."""
    adapter, device = _load_adapter(source, Stage.DECODE), torch.device(source.device)
    inputs = replace(inputs, num_outputs=batch)
    diffuse = _weightless(source)
    state = diffuse.prepare(safetensors.torch.load(condition), inputs)
    latents = diffuse.latents(replace(state, step=state.num_steps))
    with _join_group(member, device) as group, sequence_parallel(group):
        timed = _time_run(lambda: adapter.decode_outputs(latents, inputs), repeats, device)
        peak = measure_peak_bytes(lambda: adapter.decode_outputs(latents, inputs), latents, device)
        return Sample(*timed, peak, adapter.decode(latents, inputs).nbytes)


def _count_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def measure_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Call `run` and return the seconds until the device has done its work."""
    start_s = time.perf_counter()
    run()
    find_device(device).wait_for_all_work()
    return time.perf_counter() - start_s


def _time_run(run: Callable[[], object], repeats: int, device: torch.device) -> tuple[float, float]:
    """The median of `repeats` runs after the warm-up, and their interquartile range over it."""
    times_s = [measure_seconds(run, device) for _ in range(WARM_UP + repeats)][WARM_UP:]
    median_s = statistics.median(times_s)
    if repeats == 1:
        return median_s, 0.0
    low_s, _, high_s = statistics.quantiles(times_s, method="inclusive")
    return median_s, (high_s - low_s) / median_s


@contextmanager
def _join_group(member: MeasuredMember | None, device: torch.device) -> Iterator[SequenceGroup | None]:
    """The group of a member while it is used; None for work alone."""
    if member is None:
        yield None
        return
    store = connect_store(port=member.store_port, timeout_s=_GROUP_TIMEOUT_S)
    group = make_group(store, member.group, member.rank, member.size, device, _GROUP_TIMEOUT_S)
    try:
        yield group
    finally:
        group.close()
