"""What a live service really costs, from the answers to its warm-up: stages, overheads, workers that share cores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median, pstdev

from profiler import ProfileTable
from traces.results import ReplayResult, StageSpan
from tridentserve.engine.simulated import SimulationOptions
from tridentserve.errors import ConfigError, ProfileError
from tridentserve.requests import Shape
from tridentserve.stages import Stage

# The stages of one model and size.
Point = tuple[str, Stage, Shape]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Answers to requests that a service had to itself, one at a time, and to requests that came `together`, by how
    many they were."""

    alone: Sequence[ReplayResult]
    together: Mapping[int, Sequence[ReplayResult]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds. `stage_s`: at degree 1, per step for DIFFUSE. `http_s`: of the client's latency, what the service does
    not see. The rest is as in `SimulationOptions`."""

    stage_s: dict[Point, float]
    http_s: dict[Shape, float]
    jitter: float
    plan_overhead_s: float
    report_overhead_s: float
    picture_s_per_pixel: float
    slowdown: tuple[float, ...]

    def options(self, seed: int = 0) -> SimulationOptions:
        return SimulationOptions(
            jitter=self.jitter,
            seed=seed,
            plan_overhead_s=self.plan_overhead_s,
            report_overhead_s=self.report_overhead_s,
            picture_s_per_pixel=self.picture_s_per_pixel,
            slowdown=self.slowdown,
            keep_plans=True,
        )


def calibrate(warm_up: WarmUp) -> Calibration:
    """Medians over the warm-up. Raises `ConfigError` when a request failed, or the service does not say what it saw."""
    for result in (*warm_up.alone, *(result for results in warm_up.together.values() for result in results)):
        if result.error is not None or not result.facts.timeline or result.facts.latency_s is None:
            raise ConfigError(f"the warm-up failed: {result.error or 'the service tells neither timeline nor latency'}")
    alone = warm_up.alone
    plan_overhead_s = median(result.facts.queue_s or 0.0 for result in alone)
    everything = [*alone, *(result for results in warm_up.together.values() for result in results)]
    # Between two stages on different workers: one report, one plan.
    gaps = _gaps(alone) or _gaps(everything)
    report_overhead_s = max(0.0, median(gaps) - plan_overhead_s) if gaps else plan_overhead_s
    stages = _stages(alone)
    return Calibration(
        stage_s={point: median(seconds) for point, seconds in stages.items()},
        http_s=_by_shape(alone, lambda result: result.latency_s - (result.facts.latency_s or 0.0)),
        jitter=_spread(stages),
        plan_overhead_s=plan_overhead_s,
        report_overhead_s=report_overhead_s,
        picture_s_per_pixel=_picture_s_per_pixel(alone, report_overhead_s),
        slowdown=_slowdown(warm_up),
    )


def measured(tables: Sequence[ProfileTable], stage_s: dict[Point, float]) -> list[ProfileTable]:
    """The tables with what was measured at degree 1. Wider degrees of the same size change in proportion. Raises
    `ProfileError` for a size that was measured but is in no table."""
    rows = {
        (row.model, row.stage, row.shape): row.seconds
        for table in tables
        for row in table.rows
        if (row.degree, row.batch) == (1, 1)
    }
    if missing := [point for point in stage_s if point not in rows]:
        model, stage, shape = missing[0]
        raise ProfileError(f"{model} {stage} was not profiled at {shape}; choose --sides that were, or profile it")
    ratios = {point: seconds / rows[point] for point, seconds in stage_s.items()}
    return [
        replace(
            table,
            rows=tuple(
                replace(row, seconds=row.seconds * ratios.get((row.model, row.stage, row.shape), 1.0))
                for row in table.rows
            ),
        )
        for table in tables
    ]


def stage_samples(result: ReplayResult) -> list[tuple[Point, StageSpan, float]]:
    """Of each stage of an answer: what it was, how it ran, and its seconds (per step for DIFFUSE)."""
    shape = Shape(result.request.height, result.request.width, result.request.num_frames)
    return [
        ((result.model, Stage(span.stage), shape), span, (span.end_s - span.start_s) / (span.steps or 1))
        for span in result.facts.timeline
    ]


def _stages(results: Sequence[ReplayResult]) -> dict[Point, list[float]]:
    found: defaultdict[Point, list[float]] = defaultdict(list)
    for result in results:
        for point, span, seconds in stage_samples(result):
            if span.degree == 1:
                found[point].append(seconds)
    return dict(found)


def _spread(stages: dict[Point, list[float]]) -> float:
    """Relative standard deviation of DIFFUSE, which most of the time goes to."""
    found = [pstdev(s) / fmean(s) for (_, stage, _), s in stages.items() if stage is Stage.DIFFUSE and len(s) > 1]
    return fmean(found) if found else 0.0


def _gaps(results: Sequence[ReplayResult]) -> list[float]:
    return [
        max(0.0, after.start_s - before.end_s)
        for result in results
        for before, after in pairwise(sorted(result.facts.timeline, key=lambda span: span.start_s))
        if before.workers != after.workers
    ]


def _by_shape(results: Sequence[ReplayResult], figure: Callable[[ReplayResult], float]) -> dict[Shape, float]:
    found: defaultdict[Shape, list[float]] = defaultdict(list)
    for result in results:
        found[Shape(result.request.height, result.request.width, result.request.num_frames)].append(figure(result))
    return {shape: median(values) for shape, values in found.items()}


def _picture_s_per_pixel(results: Sequence[ReplayResult], report_overhead_s: float) -> float:
    """From the end of DECODE until the scheduler knows, less what any report takes, per pixel; all sizes together."""

    def after_decode_s(result: ReplayResult) -> float:
        facts = result.facts
        ran_s = max(span.end_s for span in facts.timeline) - min(span.start_s for span in facts.timeline)
        return max(0.0, (facts.latency_s or 0.0) - (facts.queue_s or 0.0) - ran_s - report_overhead_s)

    by_shape = _by_shape(results, after_decode_s)
    return sum(by_shape.values()) / sum(shape.pixels for shape in by_shape)


def _slowdown(warm_up: WarmUp) -> tuple[float, ...]:
    """DIFFUSE with n at once over DIFFUSE alone, at degree 1; never falling."""
    alone = {point: median(seconds) for point, seconds in _stages(warm_up.alone).items()}
    factors = [1.0]
    for _, results in sorted(warm_up.together.items()):
        found = [
            median(seconds) / alone[point]
            for point, seconds in _stages(results).items()
            if point[1] is Stage.DIFFUSE and point in alone
        ]
        factors.append(max(factors[-1], fmean(found)) if found else factors[-1])
    return tuple(factors)
