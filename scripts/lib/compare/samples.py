"""Stages as they ran on a live service, read from its answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from traces.results import ReplayResult
from tridentserve.requests import Shape
from tridentserve.stages import Stage


class StagePoint(NamedTuple):
    """The point for which a stage time is known."""

    model: str
    stage: Stage
    shape: Shape
    degree: int


@dataclass(frozen=True, slots=True)
class StageSample:
    """One stage of one request: unix seconds, the workers in rank order, the steps that it made (1 unless DIFFUSE)."""

    point: StagePoint
    workers: tuple[str, ...]
    start_s: float
    end_s: float
    steps: int

    @property
    def seconds(self) -> float:
        """The duration, per step for DIFFUSE."""
        return (self.end_s - self.start_s) / self.steps


def list_stage_samples(results: Iterable[ReplayResult]) -> list[StageSample]:
    """The samples of all stages of all answers, in order."""
    return [
        StageSample(
            StagePoint(result.model, Stage(span.stage), get_shape(result), span.degree),
            span.workers,
            span.start_s,
            span.end_s,
            span.steps or 1,
        )
        for result in results
        for span in result.facts.timeline
    ]


def get_shape(result: ReplayResult) -> Shape:
    return Shape(result.request.height, result.request.width, result.request.num_frames)
