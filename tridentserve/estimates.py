"""Expected seconds of stages as plans run them: the one place where a plan's degree becomes a stage's degree."""

from __future__ import annotations

from collections.abc import Sequence

from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import Stage


def stage_degree(times: StageTimes, model: str, stage: Stage, degree: int) -> int:
    """How many of a plan's `degree` workers really run this stage.

    All of them run D. E and C use the widest degree that was profiled up to it, the leader alone (1) as a rule; the
    others wait.
    """
    if stage is Stage.DIFFUSE or degree == 1:
        return degree
    return max((k for k in times.degrees(model, stage) if k <= degree), default=1)


def stage_seconds(
    times: StageTimes,
    spec: RequestSpec,
    stage: Stage,
    degree: int = 1,
    batch: int = 1,
    num_steps: int | None = None,
) -> float:
    """Seconds of one stage of `batch` requests like `spec` on a plan of `degree` workers; for DIFFUSE `num_steps` steps
    (None: all of the request's). `ProfileError` when that was not profiled."""
    used = stage_degree(times, spec.model, stage, degree)
    seconds = times.seconds(spec.model, stage, spec.shape, used, batch * spec.num_outputs)
    if stage is not Stage.DIFFUSE:
        return seconds
    return seconds * (spec.num_inference_steps if num_steps is None else num_steps)


def rank_peaks(
    times: StageTimes, model: str, stages: Sequence[Stage], degree: int, shape: Shape, outputs: Sequence[int]
) -> tuple[int, ...]:
    """Peak activation bytes on each worker of a plan, in rank order, for members with so many `outputs`. A batch is
    decoded one request after another. `ProfileError` when that was not profiled."""
    peaks = [0] * degree
    for stage in stages:
        used = stage_degree(times, model, stage, degree)
        batch = max(outputs) if stage is Stage.DECODE else sum(outputs)
        stage_peak = times.peak_bytes(model, stage, shape, used, batch)
        peaks[:used] = [max(peak, stage_peak) for peak in peaks[:used]]
    return tuple(peaks)
