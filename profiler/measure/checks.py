"""Checks which points of a model can be measured here, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from profiler.cost_model import BATCH_LATENCY_GROWTH, LARGEST_BATCH
from profiler.measure.configs import read_config_value
from profiler.measure.stages import Source
from tridentserve.device import find_device
from tridentserve.errors import ModelFolderError, ProfileError
from tridentserve.models.family import Family
from tridentserve.models.model_folder import detect_family, read_component_classes, read_json, stage_weights_bytes
from tridentserve.requests import Shape
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One thing to time."""

    stage: Stage
    shape: Shape
    degree: int = 1
    """The number of workers that run the stage together."""
    batch: int = 1
    """The number of requests that the stage runs for at once; for DECODE, of outputs."""

    def __str__(self) -> str:
        batch = f" batch {self.batch}" if self.batch > 1 else ""
        return f"{self.stage} {self.shape} degree {self.degree}{batch}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """All points to time."""

    shapes: Sequence[Shape]
    degrees: Sequence[int] = (1,)
    """Those of DIFFUSE; ENCODE has degree 1."""
    batches: Sequence[int] | None = (1,)
    """With None a batch is doubled for as long as it pays (`list_larger_batches`)."""
    stages: Sequence[Stage] = tuple(Stage)
    decode_degrees: Sequence[int] = (1,)
    own_shapes: Mapping[Stage, Sequence[Shape]] = field(default_factory=dict)
    """The sizes of stages that are timed at others than `shapes`."""

    @property
    def max_degree(self) -> int:
        """The most processes at once."""
        return max((point.degree for point in self.list_points()), default=1)

    def list_points(self) -> list[ProfilePoint]:
        """The points in the order of measurement: one stage after the other, so that each has the memory to itself."""
        degrees = {Stage.ENCODE: (1,), Stage.DIFFUSE: self.degrees, Stage.DECODE: self.decode_degrees}
        return [
            ProfilePoint(stage, shape, degree, batch)
            for stage in Stage
            if stage in self.stages
            for shape in self.own_shapes.get(stage, self.shapes)
            for degree in sorted(degrees[stage])
            for batch in sorted((1,) if self.batches is None else self.batches)
        ]

    def list_larger_batches(self, seconds: Mapping[ProfilePoint, float]) -> list[ProfilePoint]:
        """The next batches to time, by what was timed so far: twice the largest batch of each stage, shape and degree
        that still takes less than `BATCH_LATENCY_GROWTH` times what one takes, up to `LARGEST_BATCH`. Empty where
        `batches` are named."""
        if self.batches is not None:
            return []
        larger = []
        for point in self.list_points():
            batch = point.batch
            while (timed := seconds.get(replace(point, batch=batch))) is not None:
                if timed >= BATCH_LATENCY_GROWTH * seconds[point] and batch > 1:
                    break
                batch *= 2
            else:
                if 1 < batch <= LARGEST_BATCH:
                    larger.append(replace(point, batch=batch))
        return larger


def check_measurable(source: Source, sweep: Sweep) -> None:
    """Raises `ProfileError` for sizes that the model does not make and degrees that its family or this machine's GPUs
    do not allow, `ModelFolderError` for a model folder that is not complete. Cheap: nothing is loaded."""
    family = detect_family(source.folder)
    if source.random_weights:
        read_component_classes(source.folder)
    else:
        stage_weights_bytes(source.folder)
    for shape in (*sweep.shapes, *chain.from_iterable(sweep.own_shapes.values())):
        _check_shape(family, shape)
    batches = sweep.batches is None or sweep.batches
    if not (sweep.shapes and sweep.degrees and sweep.decode_degrees and batches and sweep.stages):
        raise ProfileError("there is nothing to measure; name at least one size, degree, batch and stage")
    degrees = [*sweep.degrees, *sweep.decode_degrees]
    if any(degree < 1 or degree & (degree - 1) for degree in degrees):
        raise ProfileError(f"degrees are {degrees}; they must be powers of two")
    if family.whole and max(degrees) > 1:
        raise ProfileError(f"{family.pipeline_class} is served whole, on one worker; measure no other degree than 1")
    if max(sweep.degrees) > 2 and not family.shares_tokens:
        raise ProfileError(f"{family.name} gains nothing beyond degree 2, one worker for each pass; measure no other")
    # A number that is none would be noticed only when the model is loaded, which takes minutes where it is large.
    _read_transformer_number(source, "num_attention_heads")
    num_devices = find_device(source.device).count_devices()
    if num_devices is not None and num_devices < sweep.max_degree:
        raise ProfileError(f"degree {sweep.max_degree} needs as many GPUs; there are {num_devices}")


def _check_shape(family: Family, shape: Shape) -> None:
    multiple = family.size_multiple
    if shape.height % multiple or shape.width % multiple:
        raise ProfileError(f"{family.name} makes no {shape}: both sides must be multiples of {multiple}")
    if not family.allows_frames(shape.num_frames):
        rule = f"{family.frame_multiple} k + 1" if family.frame_multiple else "1"
        raise ProfileError(f"{family.name} makes no {shape}: the number of frames must be {rule}")


def explain_too_large(source: Source, shape: Shape) -> str | None:
    """The reason why the model's table of positions has no room for a size; None where it has, or needs no table."""
    limit = find_side_limit(source)
    if limit is None or max(shape.height, shape.width) <= limit:
        return None
    rows = limit // detect_family(source.folder).size_multiple
    return f"the model makes no side above {limit} (pos_embed_max_size {rows})"


def find_side_limit(source: Source) -> int | None:
    """The largest side that the model's table of positions has room for, in pixels; None where it needs no table."""
    rows = _read_transformer_number(source, "pos_embed_max_size")
    return None if rows is None else rows * detect_family(source.folder).size_multiple


def _read_transformer_number(source: Source, key: str) -> int | None:
    """A number in the transformer's config, or its class's default; None where there is neither."""
    path = source.folder / "transformer" / "config.json"
    if not path.parent.is_dir():
        return None  # a U-Net
    value = read_config_value(read_component_classes(source.folder)["transformer"][1], read_json(path), key)
    if value is not None and not isinstance(value, int):
        raise ModelFolderError(f"{path} says {key} is {value!r}, which is no whole number; copy the file again")
    return value
