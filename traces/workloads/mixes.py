"""Mixes: which sizes are asked for, how often and with how many steps, as YAML files; requests drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from traces.requests import TraceRequest
from traces.workloads.arrivals import Process
from tridentserve.errors import ConfigError, ProfileError
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.stages import Stage
from tridentserve.validation import describe_problem

_SHIPPED = Path(__file__).parents[1] / "data" / "mixes"
# Policies see no prompts; these only make a drawn trace one that a live service can be sent.
_PROMPTS = (
    "a paper boat on a lake, watercolour",
    "a lighthouse at dusk, a photograph",
    "a bowl of lemons, oil on canvas",
    "a tram in the rain, a woodcut",
    "mountains above the clouds, early morning",
)

StepCounts = PositiveInt | tuple[PositiveInt, ...]


class MixShape(BaseModel):
    """One size of a mix. What it leaves out, the mix says."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    height: PositiveInt
    width: PositiveInt
    num_frames: PositiveInt = 1
    weight: PositiveFloat
    model: str | None = None
    num_inference_steps: StepCounts | None = None
    slo_s: PositiveFloat | None = None
    """The fixed deadline of the size, where the workload has one."""

    @property
    def shape(self) -> Shape:
        """The size as the planners take it."""
        return Shape(self.height, self.width, self.num_frames)


class Mix(BaseModel):
    """A mix and the rate at which its requests come."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    about: str
    model: str | None = None
    num_inference_steps: StepCounts | None = None
    """Where several numbers of steps are given, each is as likely."""
    rate_per_s: PositiveFloat
    arrivals: Process = "constant"
    num_gpus: PositiveInt
    gpu: str
    load: PositiveFloat
    """The share of the GPU-seconds of `num_gpus` of `gpu` that the requests need at degree 1 (see `load_figure`)."""
    slo_scale: PositiveFloat | None = None
    """The deadline as a multiple of the latency of a request alone, where the workload fixes one; None leaves it to the
    scheduler's rule."""
    shapes: tuple[MixShape, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_complete(self) -> Mix:
        for shape in self.shapes:
            for field in ("model", "num_inference_steps"):
                if not (getattr(shape, field) or getattr(self, field)):
                    raise ValueError(f"{field} is given neither for the mix nor for {shape.shape}")
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """The models that are asked for, sorted."""
        return tuple(sorted({self.model_of(shape) for shape in self.shapes}))

    def model_of(self, shape: MixShape) -> str:
        """The model of one of the sizes."""
        return shape.model or str(self.model)

    def steps_of(self, shape: MixShape) -> tuple[int, ...]:
        """The numbers of denoising steps of one of the sizes, each as likely."""
        steps = shape.num_inference_steps or self.num_inference_steps or ()
        return (steps,) if isinstance(steps, int) else steps


def mix_names() -> tuple[str, ...]:
    """The mixes that come with TridentServe, sorted."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.yaml")))


@lru_cache
def load_mix(name: str) -> Mix:
    """A shipped mix by its name, or a file of one's own by its path (it ends in `.yaml`).

    Raises `ConfigError` for an unknown name, and for a file that cannot be read or is no mix, with the key at fault.
    """
    path = Path(name) if name.endswith(".yaml") else _SHIPPED / f"{name}.yaml"
    if not name.endswith(".yaml") and name not in mix_names():
        raise ConfigError(f"no mix is named {name!r}; there are: {', '.join(mix_names())}; or give a path to a .yaml")
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the mix {path}: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} is no mix: it must hold keys and values")
    try:
        return Mix.model_validate({"name": path.stem, **fields})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the mix"
        raise ConfigError(f"{path}: {place}: {describe_problem(first)}") from None


def load_figure(mix: Mix, times: StageTimes, num_gpus: int | None = None) -> float:
    """GPU-seconds that a second's requests need (E + D + C, each alone, at degree 1) over those that the GPUs have.

    `num_gpus`: instead of the mix's. A stage that degree 1 was not profiled for counts at the narrowest degree that
    was. Raises `ProfileError` for a size or model that was not profiled.
    """
    total = sum(shape.weight for shape in mix.shapes)
    gpu_seconds = sum(
        shape.weight / total * _request_gpu_seconds(times, mix.model_of(shape), shape.shape, mix.steps_of(shape))
        for shape in mix.shapes
    )
    return mix.rate_per_s * gpu_seconds / (num_gpus or mix.num_gpus)


def _request_gpu_seconds(times: StageTimes, model: str, shape: Shape, steps: Sequence[int]) -> float:
    calls = {Stage.ENCODE: 1.0, Stage.DIFFUSE: sum(steps) / len(steps), Stage.DECODE: 1.0}
    return sum(count * _estimate_gpu_seconds(times, model, stage, shape) for stage, count in calls.items())


def _estimate_gpu_seconds(times: StageTimes, model: str, stage: Stage, shape: Shape) -> float:
    *narrower, widest = times.degrees(model, stage)
    for degree in narrower:
        try:
            return degree * times.seconds(model, stage, shape, degree)
        except ProfileError:
            continue
    return widest * times.seconds(model, stage, shape, widest)


def draw(mix: Mix, times_s: Sequence[float], seed: int, first_id: int = 0) -> list[TraceRequest]:
    """One request per arrival. Sizes come in the proportions of the mix, rounded to whole requests, in a seeded order.

    So traces of two seeds ask for the same work, and what differs between them is order alone. Ids count from
    `first_id`.
    """
    rng = Random(seed)
    deck = [
        (shape, steps)
        for shape, count in zip(mix.shapes, _apportion([s.weight for s in mix.shapes], len(times_s)), strict=True)
        for steps in _spread(mix.steps_of(shape), count, rng)
    ]
    rng.shuffle(deck)
    return [
        TraceRequest(
            request_id=str(index),
            timestamp_s=round(time_s, 6),
            height=shape.height,
            width=shape.width,
            num_frames=shape.num_frames,
            prompt=rng.choice(_PROMPTS),
            negative_prompt="",
            num_inference_steps=steps,
            slo_ms=None if shape.slo_s is None else 1000 * shape.slo_s,
            seed=index,
            model=mix.model_of(shape),
        )
        for index, (time_s, (shape, steps)) in enumerate(zip(times_s, deck, strict=True), start=first_id)
    ]


def _apportion(weights: Sequence[float], count: int) -> list[int]:
    """Whole numbers in proportion to the weights that add up to `count` (largest remainders)."""
    total = sum(weights)
    shares = [weight / total * count for weight in weights]
    whole = [int(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda index: whole[index] - shares[index])
    for index in by_remainder[: count - sum(whole)]:
        whole[index] += 1
    return whole


def _spread(steps: Sequence[int], count: int, rng: Random) -> list[int]:
    """`count` numbers of steps, each of the choices as often; the odd ones are drawn."""
    return [*steps] * (count // len(steps)) + rng.sample(list(steps), count % len(steps))
