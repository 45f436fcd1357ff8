"""The real costs of a live service, from the answers to its warm-up: stages, overheads, workers that share cores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from statistics import fmean, median, pstdev

from lib.compare.crowding import estimate_slowdown
from lib.compare.samples import StagePoint, StageSample, get_shape, list_stage_samples
from lib.compare.warm_up import WarmUp
from profiler import ProfileTable
from traces.results import ReplayResult
from tridentserve.engine.simulated import SimulationOptions
from tridentserve.errors import ConfigError, ProfileError
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class Calibration:
    """The costs of a live service, in seconds; fields without a docstring are as in `SimulationOptions`."""

    stage_s: dict[StagePoint, float]
    """The times of stages on a service that does nothing else, per step for DIFFUSE."""
    http_s: dict[Shape, float]
    """The part of the client's latency that the service does not see."""
    jitter: float
    plan_overhead_s: float
    report_overhead_s: float
    image_s_per_pixel: float
    slowdown: tuple[float, ...]
    wide_slowdown: tuple[float, ...]

    def make_options(self, seed: int) -> SimulationOptions:
        return SimulationOptions(
            jitter=self.jitter,
            seed=seed,
            plan_overhead_s=self.plan_overhead_s,
            report_overhead_s=self.report_overhead_s,
            image_s_per_pixel=self.image_s_per_pixel,
            slowdown=self.slowdown,
            wide_slowdown=self.wide_slowdown,
            keep_plans=True,
        )


def calibrate(warm_ups: Sequence[WarmUp], num_workers: int, others: Sequence[WarmUp] = ()) -> Calibration:
    """Means of stages, medians of overheads. Raises `ConfigError` when a request failed, or the service does not say
    what it saw.

    `others`: warm-ups of the same service at other times. They add to what is known of workers that slow each other
    down, and of plans on several workers where `warm_ups` had none: that needs many samples, and drifts less."""
    warm_up, seen = reduce(WarmUp.add, warm_ups), [*warm_ups, *others]
    for result in (result for each in seen for result in each.everything):
        if result.error is not None or not result.facts.timeline or result.facts.latency_s is None:
            raise ConfigError(f"the warm-up failed: {result.error or 'the service tells neither timeline nor latency'}")
    alone = warm_up.alone
    plan_overhead_s = median(result.facts.queue_s or 0.0 for result in alone)
    # Between two stages on different workers: one report, one plan.
    gaps = _list_gaps(alone) or _list_gaps(warm_up.everything)
    report_overhead_s = max(0.0, median(gaps) - plan_overhead_s) if gaps else plan_overhead_s
    stages = _group_stages(list_stage_samples(alone), wide=False)
    stage_s = _average_stages(stages) | (
        _average_wide_stages(warm_up) or _average_wide_stages(reduce(WarmUp.add, seen))
    )
    slowdown, wide_slowdown = _estimate_slowdowns(seen, num_workers)
    return Calibration(
        stage_s=stage_s,
        http_s=_average_by_shape(alone, lambda result: result.latency_s - (result.facts.latency_s or 0.0)),
        jitter=_measure_spread(stages),
        plan_overhead_s=plan_overhead_s,
        report_overhead_s=report_overhead_s,
        image_s_per_pixel=_estimate_image_s_per_pixel(alone, report_overhead_s),
        slowdown=slowdown,
        wide_slowdown=wide_slowdown,
    )


def _estimate_slowdowns(warm_ups: Sequence[WarmUp], num_workers: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The slowdowns of plans on one worker and of plans on several (the former, where none of the latter was seen). The
    time of a stage alone is the one in the same warm-up."""
    crowds = []
    wide_s = _average_wide_stages(reduce(WarmUp.add, warm_ups))
    for warm_up in warm_ups:
        alone_s = (
            _average_stages(_group_stages(list_stage_samples(warm_up.alone), wide=False))
            | wide_s
            | _average_wide_stages(warm_up)
        )
        crowds += [(list_stage_samples(results), alone_s) for results in warm_up.crowds]
    narrow = estimate_slowdown(crowds, num_workers, wide=False)
    saw_wide = any(sample.point.degree > 1 for crowd, _ in crowds for sample in crowd)
    return narrow, estimate_slowdown(crowds, num_workers, wide=True) if saw_wide else narrow


def _average_wide_stages(warm_up: WarmUp) -> dict[StagePoint, float]:
    """Seconds of the stages that ran on several workers, and had the service to themselves."""
    return _average_stages(_group_stages(list_stage_samples([*warm_up.alone, *warm_up.hurried]), wide=True))


def _average_stages(stages: Mapping[StagePoint, Sequence[float]]) -> dict[StagePoint, float]:
    return {point: fmean(seconds) for point, seconds in stages.items()}


def compute_hurry_ms(times: StageTimes, model: str, sides: Sequence[int], num_steps: int) -> dict[int, float]:
    """For each side in pixels, a latency that the scheduler, by `times`, expects of two workers but not of one.
    Empty where two are no faster."""

    def estimate_latency_s(side: int, degree: int) -> float:
        shape = Shape(side, side)
        ends_s = sum(times.seconds(model, stage, shape) for stage in (Stage.ENCODE, Stage.DECODE))
        return ends_s + num_steps * times.seconds(model, Stage.DIFFUSE, shape, degree)

    if 2 not in times.degrees(model, Stage.DIFFUSE):
        return {}
    expected = {side: (estimate_latency_s(side, 1), estimate_latency_s(side, 2)) for side in sides}
    return {side: 500 * (one_s + two_s) for side, (one_s, two_s) in expected.items() if two_s < one_s}


def apply_measured(tables: Sequence[ProfileTable], stage_s: dict[StagePoint, float]) -> list[ProfileTable]:
    """The tables with what was measured. Degrees that were not change in proportion to degree 1. Raises `ProfileError`
    for a size that was measured but is in no table."""
    rows = {
        StagePoint(row.model, row.stage, row.shape, row.degree): row.seconds
        for table in tables
        for row in table.rows
        if row.batch == 1
    }
    if missing := [point for point in stage_s if point not in rows]:
        model, stage, shape, degree = missing[0]
        raise ProfileError(
            f"{model} {stage} was not profiled at {shape}, degree {degree}; choose --sides that were, or profile it"
        )

    def compute_ratio(point: StagePoint) -> float:
        for known in (point, point._replace(degree=1)):
            if known in stage_s:
                return stage_s[known] / rows[known]
        return 1.0

    return [
        replace(
            table,
            rows=tuple(
                replace(
                    row, seconds=row.seconds * compute_ratio(StagePoint(row.model, row.stage, row.shape, row.degree))
                )
                for row in table.rows
            ),
        )
        for table in tables
    ]


def _group_stages(samples: Sequence[StageSample], wide: bool) -> dict[StagePoint, list[float]]:
    """Seconds of the stages that ran on several workers, or on one."""
    found: defaultdict[StagePoint, list[float]] = defaultdict(list)
    for sample in samples:
        if (sample.point.degree > 1) == wide:
            found[sample.point].append(sample.seconds)
    return dict(found)


def _measure_spread(stages: dict[StagePoint, list[float]]) -> float:
    """Relative standard deviation of DIFFUSE, which most of the time goes to."""
    found = [pstdev(s) / fmean(s) for point, s in stages.items() if point.stage is Stage.DIFFUSE and len(s) > 1]
    return fmean(found) if found else 0.0


def _list_gaps(results: Sequence[ReplayResult]) -> list[float]:
    """Seconds between two plans of a request. E on the leader of D's workers is in one plan with D."""
    return [
        max(0.0, after.start_s - before.end_s)
        for result in results
        for before, after in pairwise(sorted(result.facts.timeline, key=lambda span: span.start_s))
        if not set(before.workers) <= set(after.workers)
    ]


def _average_by_shape(results: Sequence[ReplayResult], figure: Callable[[ReplayResult], float]) -> dict[Shape, float]:
    found: defaultdict[Shape, list[float]] = defaultdict(list)
    for result in results:
        found[get_shape(result)].append(figure(result))
    return {shape: median(values) for shape, values in found.items()}


def _estimate_image_s_per_pixel(results: Sequence[ReplayResult], report_overhead_s: float) -> float:
    """Seconds per pixel from the end of DECODE until the scheduler knows, without those of a report; over all sizes."""

    def measure_after_decode_s(result: ReplayResult) -> float:
        facts = result.facts
        ran_s = max(span.end_s for span in facts.timeline) - min(span.start_s for span in facts.timeline)
        return max(0.0, (facts.latency_s or 0.0) - (facts.queue_s or 0.0) - ran_s - report_overhead_s)

    by_shape = _average_by_shape(results, measure_after_decode_s)
    return sum(by_shape.values()) / sum(shape.pixels for shape in by_shape)
