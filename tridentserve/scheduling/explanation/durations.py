"""The durations of a decision log, against those that a profile predicts: what a re-run of the log goes by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from tridentserve.errors import ProfileError
from tridentserve.plans import DispatchPlan, StageSpan
from tridentserve.protocols import StageTimes
from tridentserve.scheduling.estimation.plan_estimates import mixed_seconds
from tridentserve.scheduling.explanation.chronicle import Chronicle, LoggedPlan
from tridentserve.stages import Stage

# The requests of a plan and the step of the first one with which it began.
_PlanKey = tuple[tuple[str, ...], int]


@dataclass(frozen=True, slots=True)
class LoggedDurations:
    """Seconds of a log as factors on a profile, and the times around the stages of plans."""

    of_plans: dict[tuple[_PlanKey, Stage], float]
    """The seconds of a stage of a plan over those predicted for its degree and batch."""
    of_requests: dict[tuple[str, Stage], float]
    """The same of all plans of which a request was the first member."""
    of_models: dict[tuple[str, Stage], float]
    """The median of all plans of a model."""
    start_s: float
    """Seconds from when a plan can begin to its first stage."""
    report_s: float
    """Seconds from the end of a plan to its report, without those that grow with the pixels."""
    image_s_per_pixel: float
    """Seconds that each decoded pixel adds to that."""
    load_factor: float
    """The seconds of loads over those predicted."""

    def get_factor(self, plan: DispatchPlan, stage: Stage) -> float:
        """The factor on the predicted seconds of a stage of a plan, whatever its degree: that of the same plan in the
        log, else of its first request, else of its model."""
        of_models = self.of_models.get((plan.model, stage), 1.0)
        of_request = self.of_requests.get((plan.members[0].request_id, stage), of_models)
        return self.of_plans.get((_make_key(plan), stage), of_request)


def measure_durations(chronicle: Chronicle, times: StageTimes) -> LoggedDurations:
    """`times` is the profile as it stands: a copy that has learned nothing."""
    of_plans: dict[tuple[_PlanKey, Stage], float] = {}
    sums: defaultdict[tuple[str, Stage], list[float]] = defaultdict(lambda: [0.0, 0.0])
    of_models: defaultdict[tuple[str, Stage], list[float]] = defaultdict(list)
    for logged in chronicle.plans.values():
        for span in logged.spans:
            predicted_s = _predict(chronicle, logged, span, times)
            if predicted_s <= 0 or span.seconds <= 0:
                continue
            of_plans[_make_key(logged.plan), span.stage] = span.seconds / predicted_s
            of_models[logged.plan.model, span.stage].append(span.seconds / predicted_s)
            both = sums[logged.plan.members[0].request_id, span.stage]
            both[0], both[1] = both[0] + span.seconds, both[1] + predicted_s
    report_s, image_s_per_pixel = _measure_reports(chronicle)
    return LoggedDurations(
        of_plans=of_plans,
        of_requests={key: seconds / predicted_s for key, (seconds, predicted_s) in sums.items()},
        of_models={key: median(found) for key, found in of_models.items()},
        start_s=_median(_list_starts(chronicle)),
        report_s=report_s,
        image_s_per_pixel=image_s_per_pixel,
        load_factor=_measure_loads(chronicle, times),
    )


def teach(times: StageTimes, chronicle: Chronicle, until_s: float) -> None:
    """Have stage times learn from all plans that were reported up to a time, as a scheduler did then."""
    reported = [each for each in chronicle.plans.values() if each.reported_s is not None and each.reported_s <= until_s]
    for logged in sorted(reported, key=lambda each: each.reported_s or 0.0):
        specs = [life.spec for name in logged.plan.request_ids if (life := chronicle.lives.get(name)) is not None]
        for span in logged.spans if specs else ():
            calls = (
                1 if span.stage is not Stage.DIFFUSE else logged.plan.num_steps if span.steps is None else span.steps
            )
            is_mixed = len({spec.shape for spec in specs}) > 1 and span.stage is not Stage.ENCODE
            if calls and not is_mixed and all(spec.quality == "exact" for spec in specs):
                batch = len(logged.plan.members) * max(spec.num_outputs for spec in specs)
                degree = max(1, len(span.workers))
                times.observe(logged.plan.model, span.stage, specs[0].shape, degree, batch, span.seconds / calls)


def _make_key(plan: DispatchPlan) -> _PlanKey:
    steps = plan.members[0].steps
    return plan.request_ids, steps[0] if steps is not None else 0


def _predict(chronicle: Chronicle, logged: LoggedPlan, span: StageSpan, times: StageTimes) -> float:
    """The predicted seconds of a stage of a plan as it ran; 0 where there is no prediction."""
    specs = [life.spec for name in logged.plan.request_ids if (life := chronicle.lives.get(name)) is not None]
    if len(specs) != len(logged.plan.members):
        return 0.0
    members = [(spec.shape, spec.num_outputs) for spec in specs]
    try:
        seconds = mixed_seconds(times, logged.plan.model, span.stage, max(1, len(span.workers)), members)
    except ProfileError:
        return 0.0
    steps = span.steps if span.steps is not None else logged.plan.num_steps
    return seconds * steps if span.stage is Stage.DIFFUSE else seconds


def _list_starts(chronicle: Chronicle) -> Iterator[float]:
    """Seconds from when plans had their workers to the first stage, of those that took over nothing and loaded
    nothing."""
    loading = {(load.worker_id, load.end_s) for load in chronicle.loads}
    for logged in chronicle.plans.values():
        if not logged.spans or not logged.begins_with_content:
            continue
        begin_s = max(
            (
                booking.start_s
                for worker_id in logged.plan.workers
                for booking in chronicle.list_bookings(worker_id)
                if booking.kind == "runs" and booking.end_s == logged.reported_s
            ),
            default=logged.sent_s,
        )
        first_s = logged.spans[0].start_s
        if not any(worker_id in logged.plan.workers and begin_s < end_s <= first_s for worker_id, end_s in loading):
            yield max(0.0, first_s - begin_s)


def _measure_reports(chronicle: Chronicle) -> tuple[float, float]:
    plain: list[float] = []
    decoded: list[tuple[float, int]] = []
    for logged in chronicle.plans.values():
        if not logged.spans or logged.reported_s is None:
            continue
        delay_s = max(0.0, logged.reported_s - logged.spans[-1].end_s)
        lives = [chronicle.lives.get(name) for name in logged.plan.request_ids]
        pixels = sum(life.spec.shape.pixels * life.spec.num_outputs for life in lives if life is not None)
        if Stage.DECODE not in logged.plan.stages:
            plain.append(delay_s)
        elif pixels:
            decoded.append((delay_s, pixels))
    report_s = _median(plain) if plain else min((delay_s for delay_s, _ in decoded), default=0.0)
    return report_s, _median(max(0.0, delay_s - report_s) / pixels for delay_s, pixels in decoded)


def _measure_loads(chronicle: Chronicle, times: StageTimes) -> float:
    factors = []
    for load in chronicle.loads:
        predicted_s = times.load_seconds(load.replica.model, load.replica.stage, load.source)
        if predicted_s > 0:
            factors.append((load.end_s - load.start_s) / predicted_s)
    return _median(factors) if factors else 1.0


def _median(values: Iterator[float] | list[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0
