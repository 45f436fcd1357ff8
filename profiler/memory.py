"""Memory arithmetic shared by the planners: what a worker's replicas hold, and what running stages needs on top."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tridentserve.errors import ProfileError
from tridentserve.plans import Replica
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.stages import Stage


def held_weights_bytes(times: StageTimes, replicas: Iterable[Replica]) -> int:
    """Bytes of these replicas' weights on one worker together. `ProfileError` when a model is not profiled."""
    return sum(times.weights_bytes(replica.model, replica.stage) for replica in replicas)


def largest_unit(times: StageTimes, replicas: Iterable[Replica]) -> int:
    """How many workers hold the weights of one of these stages together (`StageTimes.unit`): the largest number."""
    return max((times.unit(replica.model, replica.stage) for replica in replicas), default=1)


def stages_peak_bytes(
    times: StageTimes, model: str, stages: Iterable[Stage], shape: Shape, degree: int = 1, batch: int = 1
) -> int:
    """Peak activation bytes of stages that run one after the other on one worker: that of the largest.

    DIFFUSE runs at `degree`; ENCODE and DECODE run whole on one worker (or unit). `ProfileError` outside the profile.
    """
    return max(
        times.peak_bytes(model, stage, shape, degree if stage is Stage.DIFFUSE else 1, batch) for stage in stages
    )


def peak_bytes_by_degree(
    times: StageTimes, model: str, stages: Collection[Stage], shape: Shape, degrees: Iterable[int], batch: int = 1
) -> dict[int, int]:
    """`stages_peak_bytes` at each degree that was profiled up to this size (wide degrees need not cover small sizes,
    nor narrow ones large sizes). `ProfileError` when none covers it."""
    peaks: dict[int, int] = {}
    uncovered: ProfileError | None = None
    for degree in degrees:
        try:
            peaks[degree] = stages_peak_bytes(times, model, stages, shape, degree, batch)
        except ProfileError as error:
            uncovered = uncovered or error
    if not peaks and uncovered is not None:
        raise uncovered
    return peaks
