"""The work of a request at its optimal degrees."""

from __future__ import annotations

from dataclasses import dataclass

from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.estimation.plan_estimates import stage_seconds
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class RequestWork:
    """The time and the workers that a request takes."""

    degree: int
    """Workers of D."""
    seconds: float
    """From its start to its end, without waiting."""
    gpu_seconds: float


def estimate_work(times: StageTimes, spec: RequestSpec) -> RequestWork:
    """The work of a request with every stage at its optimal degree. `ProfileError` when that was not profiled."""
    degrees = {stage: times.optimal_degree(spec.model, stage, spec.shape) for stage in Stage}
    seconds = {stage: stage_seconds(times, spec, stage, degree) for stage, degree in degrees.items()}
    gpu_seconds = sum(degrees[stage] * stage_s for stage, stage_s in seconds.items())
    return RequestWork(degrees[Stage.DIFFUSE], sum(seconds.values()), gpu_seconds)
