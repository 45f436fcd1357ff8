"""The offline profiler: measures every stage of a model at every size and degree, and makes a profile table of it.

TridentServe, arXiv 2510.02838, section 5.1 ("Profiler"). Needs torch and diffusers, but no Ray: it runs on any machine
with the device in question. Degrees above 1 run in processes of their own, joined by gloo (CPU) or NCCL (CUDA).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from profiler.measure_stages import (
    Member,
    Sample,
    Source,
    num_steps,
    sample_decode,
    sample_diffuse,
    sample_encode,
    set_threads,
)
from profiler.tables import ProfileRow, ProfileTable, WeightsRow
from tridentserve.checkpoints import detect_family, read_json, stage_weights_bytes
from tridentserve.errors import CheckpointError, ProfileError
from tridentserve.parallel import connect_store
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

_PROMPT = "a lighthouse on a cliff above the sea at dawn, seen from a small boat, oil on canvas"


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """`repeats`: timed runs per point, of which the median counts. `passes`: how often all points are gone over; the
    lowest median counts, since other load on a machine only ever adds. `num_threads`: torch threads of one worker."""

    repeats: int = 10
    passes: int = 1
    num_threads: int = 1


Point = tuple[Stage, Shape, int]


def points(shapes: Sequence[Shape], degrees: Sequence[int]) -> list[Point]:
    """What `measure` measures in one pass, in order: ENCODE and DECODE at degree 1, DIFFUSE at every degree."""
    return [
        (stage, shape, degree)
        for shape in shapes
        for stage in Stage
        for degree in (sorted(degrees) if stage is Stage.DIFFUSE else (1,))
    ]


def measure(
    source: Source,
    model: str,
    shapes: Sequence[Shape],
    degrees: Sequence[int],
    options: MeasureOptions,
    on_point: Callable[[Point, Sample, ProfileTable], None] = lambda point, sample, table: None,
    on_skip: Callable[[Point, str], None] = lambda point, reason: None,
) -> ProfileTable:
    """The table of one model on one device. `on_point` hears of each measured point, with the table so far.

    A point that the model or the memory of the device does not allow is left out, and `on_skip` hears why.
    Raises what `check_measurable` raises, and `ProfileError` when no point could be measured or a process was lost.
    """
    check_measurable(source, shapes, degrees)
    weights = stage_weights_bytes(source.folder, _element_bytes(source))
    where = f"measured: median of {options.repeats} in the fastest of {options.passes} passes"
    device = device_name(source.device)
    set_threads(options.num_threads)
    best: dict[Point, Sample] = {}
    skipped: set[Point] = set()
    table = ProfileTable(model, (), ())
    with _Processes(_on_rank(source, 0), max(degrees), options) as processes:
        for _ in range(options.passes):
            wanted = [point for point in points(shapes, degrees) if point not in skipped]
            for point, sample in processes.samples(wanted):
                if isinstance(sample, str):
                    skipped.add(point)
                    on_skip(point, sample)
                    continue
                seconds = min(sample.seconds, best[point].seconds if point in best else sample.seconds)
                best[point] = replace(sample, seconds=seconds)
                rows = (
                    ProfileRow(model, device, stage, shape, degree, 1, kept.seconds, kept.peak_bytes, where)
                    for (stage, shape, degree), kept in best.items()
                )
                held = (_weights_row(model, stage, weights[stage], best) for stage in Stage)
                table = ProfileTable(model, tuple(rows), tuple(held))
                on_point(point, sample, table)
    if not best:
        raise ProfileError(f"no point of {model} could be measured; choose smaller sizes")
    return table


def _weights_row(model: str, stage: Stage, weights_bytes: int, best: Mapping[Point, Sample]) -> WeightsRow:
    """A condition has one size; latents and pixels grow with the tokens."""
    outputs = [(shape, sample.output_bytes) for (kind, shape, _), sample in best.items() if kind is stage]
    source = "measured: safetensors headers and the tensors returned"
    if stage is Stage.ENCODE:
        condition_bytes = max((num_bytes for _, num_bytes in outputs), default=0)
        return WeightsRow(model, stage, weights_bytes, source, output_bytes=condition_bytes)
    per_token = max((num_bytes / shape.tokens for shape, num_bytes in outputs), default=0.0)
    return WeightsRow(model, stage, weights_bytes, source, output_bytes_per_token=per_token)


def device_name(device: str) -> str:
    """What the `gpu` column says: `cpu`, or the name CUDA gives the GPU."""
    return "cpu" if torch.device(device).type == "cpu" else torch.cuda.get_device_name(torch.device(device))


class _Processes:
    """One process per rank above 0, kept for all points; rank 0 and degree 1 run in this process."""

    def __init__(self, source: Source, max_degree: int, options: MeasureOptions) -> None:
        self._source = source
        self._repeats = options.repeats
        self._stack = ExitStack()
        self._store = connect_store(is_server=True)
        self._groups_made = 0
        context = multiprocessing.get_context("spawn")
        self._ranks = [
            self._stack.enter_context(
                ProcessPoolExecutor(1, context, initializer=set_threads, initargs=(options.num_threads,))
            )
            for _ in range(1, max_degree)
        ]

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def samples(self, wanted: Sequence[Point]) -> Iterator[tuple[Point, Sample | str]]:
        """Measure points in order; ENCODE of a shape comes before its other stages, which use its condition. What
        cannot be measured gives the reason instead of a sample."""
        conditions: dict[Shape, bytes] = {}
        for point in wanted:
            stage, shape, _ = point
            if (reason := _too_large(self._source, shape)) is not None:
                yield point, reason
            elif stage is not Stage.ENCODE and shape not in conditions:
                yield point, "its encode stage could not be measured"
            else:
                try:
                    yield point, self._sample(point, conditions)
                except (MemoryError, RuntimeError) as error:
                    if not _is_out_of_memory(error):
                        raise
                    yield point, f"out of memory ({str(error).partition('. ')[0]})"

    def _sample(self, point: Point, conditions: dict[Shape, bytes]) -> Sample:
        """Measure one point. The condition of its shape is added by ENCODE and used by the others."""
        stage, shape, degree = point
        steps = num_steps(self._repeats) if stage is Stage.DIFFUSE else 1
        inputs = GenerationInputs(_PROMPT, shape, steps, guidance_scale=self._guidance, seed=0)
        if stage is Stage.ENCODE:
            sample, conditions[shape] = sample_encode(self._source, inputs, self._repeats)
            return sample
        if stage is Stage.DECODE:
            return sample_decode(self._source, inputs, conditions[shape], self._repeats)
        return self._diffuse(inputs, conditions[shape], degree)

    @property
    def _guidance(self) -> float:
        return detect_family(self._source.folder).default_guidance_scale

    def _diffuse(self, inputs: GenerationInputs, condition: bytes, degree: int) -> Sample:
        if degree == 1:
            return sample_diffuse(self._source, inputs, condition, self._repeats)
        self._groups_made += 1
        members = [Member(self._store.port, f"profile-{self._groups_made}", rank, degree) for rank in range(degree)]
        futures = [
            self._ranks[member.rank - 1].submit(
                sample_diffuse, _on_rank(self._source, member.rank), inputs, condition, self._repeats, member
            )
            for member in members[1:]
        ]
        try:
            leader = sample_diffuse(self._source, inputs, condition, self._repeats, members[0])
            peaks = [leader.peak_bytes, *(future.result().peak_bytes for future in futures)]
        except Exception as error:
            # All ranks must be done before the next point; and of their errors, the others follow a lack of memory.
            errors = [error, *(future.exception() for future in futures)]
            if any(isinstance(failure, BrokenProcessPool) for failure in errors):
                raise ProfileError(
                    f"a process of degree {degree} died at {inputs.shape}; see the system's log"
                ) from error
            raise next((failure for failure in errors if failure and _is_out_of_memory(failure)), error) from None
        return replace(leader, peak_bytes=max(peaks))


def _on_rank(source: Source, rank: int) -> Source:
    """One GPU per rank; ranks on the CPU share it."""
    return source if torch.device(source.device).type == "cpu" else replace(source, device=f"cuda:{rank}")


def _element_bytes(source: Source) -> int | None:
    """Bytes per weight in the number format it is loaded in (see `load_adapter` for the default)."""
    default = "float32" if torch.device(source.device).type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, source.dtype or default)
    return dtype.itemsize


def check_measurable(source: Source, shapes: Sequence[Shape], degrees: Sequence[int]) -> None:
    """Raises `ProfileError` for sizes that the model does not make and degrees that its heads or this machine's GPUs do
    not allow, `CheckpointError` for a folder that is not complete. Cheap: nothing is loaded."""
    family = detect_family(source.folder)
    stage_weights_bytes(source.folder)
    for shape in shapes:
        if shape.height % family.size_multiple or shape.width % family.size_multiple:
            multiple = family.size_multiple
            raise ProfileError(f"{family.name} makes no {shape}: both sides must be multiples of {multiple}")
    if not shapes or not degrees:
        raise ProfileError("there is nothing to measure; name at least one size and one degree")
    if any(degree < 1 or degree & (degree - 1) for degree in degrees):
        raise ProfileError(f"degrees are {list(degrees)}; they must be powers of two")
    heads = _transformer_number(source, "num_attention_heads") or 0
    if heads % max(degrees):
        raise ProfileError(f"{heads} attention heads cannot be shared by {max(degrees)} workers; measure fewer degrees")
    if torch.device(source.device).type == "cuda" and torch.cuda.device_count() < max(degrees):
        raise ProfileError(f"degree {max(degrees)} needs as many GPUs; there are {torch.cuda.device_count()}")


def _transformer_number(source: Source, key: str) -> int | None:
    """A number in the transformer's config; None where there is none, as its class then has a default."""
    path = source.folder / "transformer" / "config.json"
    value = read_json(path).get(key)
    if value is not None and not isinstance(value, int):
        raise CheckpointError(f"{path} says {key} is {value!r}, which is no whole number; copy the file again")
    return value


def _too_large(source: Source, shape: Shape) -> str | None:
    """Why the model's table of positions has no room for a size; None where it has, or needs no table."""
    rows = _transformer_number(source, "pos_embed_max_size")
    limit = None if rows is None else rows * detect_family(source.folder).size_multiple
    if limit is None or max(shape.height, shape.width) <= limit:
        return None
    return f"the model makes no side above {limit} (pos_embed_max_size {rows})"


def _is_out_of_memory(error: BaseException) -> bool:
    """Of the GPU or of the host, for which torch has no class of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
