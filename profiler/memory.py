"""Memory of stages: what a worker's replicas hold, what running stages needs on top, and the table of one device."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from profiler.tables.device_profile import DeviceProfile
from tridentserve.errors import ProfileError
from tridentserve.plans import Replica
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """The memory that stages need on one device (the protocol `tridentserve.protocols.StageMemory`), for models whose
    weights are on one worker each. The table is immutable, so threads other than the cost model's can read it."""

    profile: DeviceProfile
    """The rows of the device."""

    def degrees(self, model: str, stage: Stage) -> tuple[int, ...]:
        """The degrees that were profiled, ascending. `ProfileError` if the model is unknown."""
        return self.profile.degrees(model, stage)

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        """Peak activation bytes on one worker, weights not counted. `ProfileError` if unknown."""
        sizes, scale = self.profile.find(model, stage, shape, degree, batch)
        return math.ceil(scale * sizes.peak_bytes(shape))


def sum_weights_bytes(times: StageTimes, replicas: Iterable[Replica]) -> int:
    """Bytes of these replicas' weights on one worker together. `ProfileError` when a model is not profiled."""
    return sum(times.weights_bytes(replica.model, replica.stage) for replica in replicas)


def find_largest_unit(times: StageTimes, replicas: Iterable[Replica]) -> int:
    """The largest number of workers that hold the weights of one of these stages together (`StageTimes.unit`)."""
    return max((times.unit(replica.model, replica.stage) for replica in replicas), default=1)


def list_ways_apart(stages: Collection[Stage]) -> list[frozenset[Stage]]:
    """The ways to run E and C as plans of their own on the workers of D, from neither to both, the cheapest first. Only
    the weights of one plan have to be in memory at a time: others leave, and come back."""
    optional = [stage for stage in (Stage.DECODE, Stage.ENCODE) if stage in stages and len(stages) > 1]
    return [frozenset(), *(frozenset((stage,)) for stage in optional), *([frozenset(optional)] if optional[1:] else [])]


def list_legs(stages: Collection[Stage], apart: Collection[Stage]) -> list[frozenset[Stage]]:
    """The plans that these stages make where some are apart."""
    return [frozenset(stages) - frozenset(apart), *(frozenset((stage,)) for stage in sorted(apart))]


def compute_stages_peak_bytes(
    times: StageTimes,
    model: str,
    stages: Iterable[Stage],
    shape: Shape,
    degree: int = 1,
    batch: int = 1,
    token_ratio: float = 1.0,
) -> int:
    """Peak activation bytes of stages that run one after the other on one worker: that of the largest.

    DIFFUSE runs at `degree`, with `token_ratio` times the tokens that were profiled; ENCODE and DECODE run whole on one
    worker (or unit). `ProfileError` outside the profile.
    """
    return max(
        math.ceil(token_ratio * times.peak_bytes(model, stage, shape, degree, batch))
        if stage is Stage.DIFFUSE
        else times.peak_bytes(model, stage, shape, 1, batch)
        for stage in stages
    )


def compute_peak_bytes_by_degree(
    times: StageTimes,
    model: str,
    stages: Collection[Stage],
    shape: Shape,
    degrees: Iterable[int],
    batch: int = 1,
    token_ratio: float = 1.0,
) -> dict[int, int]:
    """`compute_stages_peak_bytes` at each degree that was profiled up to this size (wide degrees need not cover small
    sizes, nor narrow ones large sizes). `ProfileError` when none covers it."""
    peaks: dict[int, int] = {}
    uncovered: ProfileError | None = None
    for degree in degrees:
        try:
            peaks[degree] = compute_stages_peak_bytes(times, model, stages, shape, degree, batch, token_ratio)
        except ProfileError as error:
            uncovered = uncovered or error
    if not peaks and uncovered is not None:
        raise uncovered
    return peaks
