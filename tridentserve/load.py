"""The load: the mix of requests that a placement is made for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tridentserve.errors import PlacementError
from tridentserve.requests import Shape


@dataclass(frozen=True, slots=True)
class LoadShare:
    """Requests of one kind."""

    model: str
    shape: Shape
    num_inference_steps: int
    weight: float = 1.0
    """Their arrivals, per second or relative to the other shares."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise PlacementError(f"{self.model} {self.shape}: weight is {self.weight}; give a number from 0 up")
        if self.num_inference_steps < 1:
            raise PlacementError(
                f"{self.model} {self.shape}: num_inference_steps is {self.num_inference_steps}; give 1+"
            )
