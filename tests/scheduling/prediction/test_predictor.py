"""Predictions beside what happens, what they learn, and that asking for them changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions
from tridentserve.models.step_cache import EXPECTED_SHARES
from tridentserve.plans import PlacementPlan, StageSpan
from tridentserve.protocols import Assignment, ClusterView, Decisions, PendingRequest, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry, decode_entry, encode_entry, replay
from tridentserve.scheduling.prediction.experience import Crowding, Estimate, Experience
from tridentserve.scheduling.prediction.predictor import Quote
from tridentserve.scheduling.prediction.scene import SharingRules
from tridentserve.scheduling.scheduler import Scheduler, SchedulerOptions
from tridentserve.stages import PlacementType
from tridentserve.testing import FixedTimes, make_cluster, make_request

SHARING = SharingRules(min_efficiency=0.8, horizon=0.25, spare=0.1, hopeless=1e-3, max_degree=1)
EMPTY = Crowding(0.0, 0.0)
KIND = ("m", make_request("x").shape, 4, 1, 1.0)


def _estimate(seconds: float, crowding: Crowding = EMPTY, degree: int = 1) -> Estimate:
    return Estimate(seconds, degree, crowding.as_signs())


class FirstDeadlineFirst:
    """Each idle worker gets the waiting request with the earliest deadline, which it runs to its end."""

    def decide(self, view: ClusterView) -> Decisions:
        waiting = sorted(view.pending, key=lambda each: (each.deadline_s, each.spec.request_id))
        idle = [worker for worker in view.workers if worker.idle]
        return Decisions([_assign(request, worker) for request, worker in zip(waiting, idle, strict=False)])

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return None


def _assign(request: PendingRequest, worker: WorkerView) -> Assignment:
    where = (worker.worker_id,)
    return Assignment((request.spec.request_id,), PlacementType.EDC, where, where, where, 0.0, "first deadline")


def _make(num_workers: int, times: FixedTimes | None = None) -> tuple[Scheduler, list[WorkerSpec], PlacementPlan]:
    workers, placement = make_cluster({f"w{number}": "EDC" for number in range(num_workers)}, 1 << 40)
    options = SchedulerOptions(predict_every_s=0.0)
    scheduler = Scheduler(workers, placement, times or FixedTimes(), FirstDeadlineFirst(), options, sharing=SHARING)
    return scheduler, workers, placement


def _feed(scheduler: Scheduler, workers: Sequence[WorkerSpec], asks: bool = False) -> Iterator[LogEntry]:
    """Requests come one a second, and each plan takes three; `asks`: quotes are asked for in between."""
    specs = [make_request(f"r{number}", slo_s=8.0 + number % 3) for number in range(12)]
    specs[7] = replace(specs[7], on_late="refuse", slo_s=0.5)
    events: list[tuple[float, ev.Event]] = [(0.0, ev.WorkerJoined(worker)) for worker in workers]
    events += [(1.0 + number, ev.RequestArrived(spec)) for number, spec in enumerate(specs)]
    ends: list[tuple[float, ev.Event]] = []
    while events or ends:
        events.sort(key=lambda each: each[0])
        ends.sort(key=lambda each: each[0])
        now_s, event = (ends if not events or (ends and ends[0][0] <= events[0][0]) else events).pop(0)
        for one in (event, ev.Tick()):
            if asks:
                scheduler.quote(make_request("asked", slo_s=5.0), now_s)
                scheduler.list_outlooks(now_s)
            effects = scheduler.on(one, now_s)
            yield LogEntry(now_s, one, effects)
            for effect in effects:
                if isinstance(effect, ev.RunPlan):
                    plan = effect.plan
                    spans = tuple(StageSpan(stage, now_s, now_s + 3.0, plan.workers) for stage in plan.stages)
                    ends.append((now_s + 3.0, ev.StageFinished(plan.plan_id, spans)))


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=8), st.integers(1, 3))
def test_a_prediction_is_what_happens_where_nothing_comes_later(gaps_s: list[float], num_workers: int) -> None:
    """All arrive before the last one, whose deadline is after theirs, so that nobody overtakes it."""
    scheduler, workers, placement = _make(num_workers)
    engine = SimulatedEngine(scheduler, workers, placement, FixedTimes())
    now_s, arrivals = 0.0, []
    for number, gap_s in enumerate(gaps_s):
        now_s += gap_s
        arrivals.append((now_s, make_request(f"r{number}", slo_s=1000.0 + 10 * number)))
    result = engine.run(arrivals)
    last = result.requests[-1]
    # A tick comes a few milliseconds after the last one, which a rehearsal leaves out.
    assert result.requests[0].predicted_s == pytest.approx(result.requests[0].latency_s, rel=0.01)
    # The experience of the first ones is that rehearsals are right, so it stays so.
    assert last.predicted_s == pytest.approx(last.latency_s, rel=0.03)


def test_questions_change_nothing_and_a_log_replays() -> None:
    scheduler, workers, _ = _make(2)
    plain = list(_feed(scheduler, workers))
    asked = list(_feed(_make(2)[0], workers, asks=True))
    assert plain == asked
    read = [decode_entry(encode_entry(entry)) for entry in plain]
    assert all(entry.effects == again for entry, again in replay(read, _make(2)[0]))


def test_a_request_that_would_be_late_is_refused_at_once_with_its_time() -> None:
    scheduler, workers, _ = _make(1)
    for worker in workers:
        scheduler.on(ev.WorkerJoined(worker), 0.0)
    alone = scheduler.quote(make_request("q", slo_s=1000.0), 0.0)
    assert isinstance(alone, Quote)
    assert (alone.is_late, alone.is_guess) == (False, True)
    spec = make_request("late", slo_s=alone.seconds / 2)
    (reject,) = scheduler.on(ev.RequestArrived(replace(spec, on_late="refuse")), 0.0)
    assert isinstance(reject, ev.Reject)
    assert reject.code == "deadline_missed"
    assert reject.predicted_s == pytest.approx(alone.seconds)
    assert scheduler.on(ev.RequestArrived(spec), 0.0) == []  # it waits
    assert scheduler.num_pending == 1
    in_time = make_request("fine", slo_s=1000.0)
    assert scheduler.on(ev.RequestArrived(replace(in_time, on_late="refuse")), 0.0) == []


def test_a_request_that_would_be_late_has_fewer_steps_where_it_asks_for_that() -> None:
    scheduler, workers, _ = _make(1)
    for worker in workers:
        scheduler.on(ev.WorkerJoined(worker), 0.0)
    spec = replace(make_request("late"), num_inference_steps=20, on_late="degrade")
    alone = scheduler.quote(replace(spec, slo_s=1000.0), 0.0)
    assert isinstance(alone, Quote)
    hopeless = replace(spec, request_id="hopeless", slo_s=alone.seconds / 10)
    assert scheduler.on(ev.RequestArrived(hopeless), 0.0) == []  # it is served as it is
    scheduler.on(ev.RequestCancelled("hopeless"), 0.0)
    (reduced,) = scheduler.on(ev.RequestArrived(replace(spec, slo_s=0.8 * alone.seconds)), 0.0)
    assert isinstance(reduced, ev.Degrade)
    assert 10 <= reduced.num_inference_steps < 20
    (run,) = (effect for effect in scheduler.on(ev.Tick(), 0.0) if isinstance(effect, ev.RunPlan))
    (member,) = run.plan.members
    assert member.steps == (0, reduced.num_inference_steps)
    entry = LogEntry(0.0, ev.Tick(), [reduced])
    assert decode_entry(encode_entry(entry)) == entry
    assert scheduler.on(ev.RequestArrived(replace(spec, request_id="fine", slo_s=1000.0)), 0.0) == []


def test_a_request_that_would_be_late_has_a_lower_quality_before_fewer_steps() -> None:
    scheduler, workers, _ = _make(1)
    for worker in workers:
        scheduler.on(ev.WorkerJoined(worker), 0.0)
    spec = replace(
        make_request("late"), num_inference_steps=20, on_late="degrade", cheaper_quality="fast", slo_s=1000.0
    )
    quotes = [scheduler.quote(replace(spec, quality=quality), 0.0) for quality in ("exact", "high", "fast")]
    exact_s, high_s, fast_s = (quote.seconds for quote in quotes if isinstance(quote, Quote))
    assert fast_s < high_s < exact_s
    (degraded,) = scheduler.on(ev.RequestArrived(replace(spec, slo_s=1.3 * fast_s)), 0.0)
    assert isinstance(degraded, ev.Degrade)
    assert (degraded.quality, degraded.num_inference_steps) == ("fast", 20)
    entry = LogEntry(0.0, ev.Tick(), [degraded])
    assert decode_entry(encode_entry(entry)) == entry
    own = replace(spec, request_id="own", slo_s=0.9 * fast_s, quality="fast")
    (degraded,) = scheduler.on(ev.RequestArrived(own), 0.0)
    assert isinstance(degraded, ev.Degrade)
    assert degraded.quality == "fast"
    assert degraded.num_inference_steps < 20


def test_a_simulated_request_in_a_lower_quality_takes_its_share_of_the_time() -> None:
    scheduler, workers, placement = _make(1)
    spec = replace(make_request("late"), num_inference_steps=20, on_late="degrade", cheaper_quality="fast")
    spec = replace(spec, slo_s=16.0)  # all steps take 20 s, and E and C 2.5
    engine = SimulatedEngine(scheduler, workers, placement, FixedTimes(), SimulationOptions(keep_plans=True))
    (result,) = engine.run([(0.0, spec)]).requests
    assert result.end_s == pytest.approx(2.5 + EXPECTED_SHARES["fast"] * 20, abs=0.5)


def test_positions_follow_deadlines() -> None:
    scheduler, workers, _ = _make(1)
    for worker in workers:
        scheduler.on(ev.WorkerJoined(worker), 0.0)
    for name, slo_s in (("a", 300.0), ("b", 100.0), ("c", 200.0)):
        scheduler.on(ev.RequestArrived(make_request(name, slo_s=slo_s)), 0.0)
    outlooks = scheduler.list_outlooks(0.0)
    assert {name: outlook.queue_position for name, outlook in outlooks.items()} == {"a": 2, "b": 0, "c": 1}
    assert outlooks["b"].finish_s < outlooks["c"].finish_s < outlooks["a"].finish_s
    scheduler.on(ev.Tick(), 0.0)
    outlooks = scheduler.list_outlooks(0.0)
    assert {name: outlook.queue_position for name, outlook in outlooks.items()} == {"a": 1, "b": 0, "c": 0}


def test_requests_that_have_ended_delay_nobody_in_a_rehearsal() -> None:
    """The latest arrivals, which had less time, are no requests that come now."""
    scheduler, workers, placement = _make(1)
    engine = SimulatedEngine(scheduler, workers, placement, FixedTimes())
    past = [(20.0 * number, make_request(f"r{number}", slo_s=10.0)) for number in range(12)]
    now_s = past[-1][0] + 20.0
    result = engine.run(
        [*past, (now_s, make_request("a", slo_s=1000.0)), (now_s + 1.0, make_request("b", slo_s=1010.0))]
    )
    for ended in result.requests[-2:]:
        assert ended.predicted_s == pytest.approx(ended.latency_s, rel=0.03)
    first, second = (ended.latency_s for ended in result.requests[-2:])
    assert first is not None
    assert second is not None
    assert second > first


@given(st.floats(0.2, 5.0), st.floats(-0.4, 0.4))
def test_experience_finds_the_ratio_and_its_growth_with_the_crowd(ratio: float, slope: float) -> None:
    experience = Experience()
    for number in range(60):
        crowding = Crowding(number % 5 / 4, 1.0)
        experience.note(KIND, _estimate(2.0, crowding), 2.0 * ratio * (1 + slope * crowding.backlog))
    for backlog in (0.0, 0.5, 1.0):
        expected_s = 3.0 * ratio * (1 + slope * backlog)
        assert experience.correct(KIND, _estimate(3.0, Crowding(backlog, 1.0))) == pytest.approx(expected_s, rel=0.1)


def test_a_new_kind_begins_with_the_experience_of_its_model() -> None:
    experience, other = Experience(), ("m", make_request("y").shape, 50, 1, 1.0)
    for _ in range(20):
        experience.note(KIND, _estimate(1.0), 2.0)
    assert not experience.knows(other)
    assert experience.correct(other, _estimate(10.0)) == pytest.approx(20.0, rel=0.05)
    assert experience.correct(("n", *other[1:]), _estimate(10.0)) == 10.0


def test_experience_is_apart_for_each_degree_that_was_expected() -> None:
    """What begins narrow becomes wider later, and takes less than it was estimated."""
    experience = Experience()
    for _ in range(20):
        experience.note(KIND, _estimate(10.0, degree=1), 7.0)
        experience.note(KIND, _estimate(4.0, degree=4), 4.0)
    assert experience.correct(KIND, _estimate(10.0, degree=1)) == pytest.approx(7.0, rel=0.03)
    assert experience.correct(KIND, _estimate(4.0, degree=4)) == pytest.approx(4.0, rel=0.03)


@pytest.mark.parametrize("is_rehearsed", [False, True])
def test_a_few_requests_that_were_overtaken_do_not_spoil_what_is_predicted_for_others(is_rehearsed: bool) -> None:
    experience = Experience()
    estimate = Estimate.of_rehearsal(2.0, 0.0) if is_rehearsed else _estimate(2.0)
    for number in range(60):
        experience.note(KIND, estimate, 30.0 if number % 6 == 5 else 2.2)
    # The mean of the logarithms would be 3.4 s.
    assert experience.correct(KIND, estimate) == pytest.approx(2.2, rel=0.1)


def test_waits_are_corrected_apart_from_the_rest_of_a_rehearsal() -> None:
    experience = Experience()
    for _ in range(40):
        experience.note(KIND, Estimate.of_rehearsal(1.0, 0.0), 1.0)
        experience.note(KIND, Estimate.of_rehearsal(2.0, 1.0), 1.6)
    assert experience.correct(KIND, Estimate.of_rehearsal(1.0, 0.0)) == pytest.approx(1.0, rel=0.05)
    assert experience.correct(KIND, Estimate.of_rehearsal(2.0, 1.0)) == pytest.approx(1.6, rel=0.1)
