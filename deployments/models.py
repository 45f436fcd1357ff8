"""The served models as the API knows them: family, limits and defaults, without loading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

from deployments.config import Limits, ModelArgs
from tridentserve.checkpoints import detect_family
from tridentserve.errors import CheckpointError
from tridentserve.families import FAMILIES, Family
from tridentserve.requests import Shape

_DEFAULT_SIDE = 1024


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as clients see it."""

    name: str
    family: Family
    limits: Limits

    @property
    def smallest(self) -> Shape:
        """The smallest square that may be asked for; larger than `largest` when the limits leave no size at all."""
        multiple = self.family.size_multiple
        side = -(-self.limits.min_side // multiple) * multiple
        return Shape(side, side)

    @property
    def largest(self) -> Shape:
        """The largest square that may be asked for."""
        side = min(self.limits.max_side, isqrt(self.limits.max_pixels))
        side -= side % self.family.size_multiple
        return Shape(side, side)

    @property
    def most_pixels(self) -> Shape:
        """The size with the most pixels that may be asked for, the longest step of D; at least the largest square."""
        multiple, limits = self.family.size_multiple, self.limits
        best = self.largest
        widest = min(limits.max_side, limits.max_pixels // limits.min_side)
        for width in range(best.width + multiple, widest + 1, multiple):
            height = limits.max_pixels // width // multiple * multiple
            if height >= limits.min_side and width * height > best.pixels:
                best = Shape(height=height, width=width)
        return best

    @property
    def default_side(self) -> int:
        """Width and height in pixels of a request that names no size: 1024 where the limits allow it."""
        return self.side_near(_DEFAULT_SIDE)

    def side_near(self, side: int) -> int:
        """Width and height of the allowed square that is nearest to `side` from below, else of the smallest."""
        below = side - side % self.family.size_multiple
        return max(self.smallest.width, min(below, self.largest.width))

    @property
    def default_steps(self) -> int:
        return min(self.family.default_steps, self.limits.max_steps)

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.family.name,
            "limits": {**self.limits.model_dump(), "size_multiple": self.family.size_multiple},
            "defaults": {
                "size": f"{self.default_side}x{self.default_side}",
                "num_inference_steps": self.default_steps,
                "guidance_scale": self.family.default_guidance_scale,
            },
        }


def served_models(models: list[ModelArgs]) -> Mapping[str, ServedModel]:
    """By name, in the order of the configuration: the first is the default. Raises `CheckpointError`."""
    return {model.name: ServedModel(model.name, family_of(model), model.limits) for model in models}


def family_of(model: ModelArgs) -> Family:
    """The family of a model, read from its `model_index.json` unless it is a tiny one. Raises `CheckpointError`, also
    for one that makes videos: there is no route to ask for them yet."""
    family = FAMILIES[model.tiny] if model.tiny is not None else detect_family(Path(model.path or ""))
    if family.frame_multiple is not None:
        raise CheckpointError(f"{model.name}: {family.name} models make videos, and only pictures are served so far")
    return family
