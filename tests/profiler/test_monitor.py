"""The Monitor: what the window holds is exact, and the trigger has hysteresis."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.monitor import Monitor, SkewTrigger, StageSpeed, WorkKind, compute_skew
from tridentserve.errors import ConfigError
from tridentserve.plans import StageSpan
from tridentserve.protocols import StageReport
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage

SMALL, LARGE = Shape(256, 256), Shape(1024, 1024)


def request(shape: Shape = SMALL, model: str = "one", outputs: int = 1) -> RequestSpec:
    return RequestSpec("r", model, shape, 20, num_outputs=outputs)


def report(stage: Stage, seconds: float, end_s: float, workers: int = 1, requests: int = 1) -> StageReport:
    names = tuple(f"w{i}" for i in range(workers))
    return StageReport("one", PlacementType.DC, SMALL, requests, StageSpan(stage, end_s - seconds, end_s, names))


events = st.lists(st.tuples(st.floats(0, 30), st.sampled_from([SMALL, LARGE]), st.integers(1, 3)), max_size=40)


@given(events, st.floats(1, 100), st.integers(0, 10))
def test_the_load_is_what_came_in_the_window(
    arrivals: list[tuple[float, Shape, int]], window_s: float, min_arrivals: int
) -> None:
    monitor, now_s, came = Monitor(default_window_s=window_s, min_arrivals=min_arrivals), 0.0, []
    for gap_s, shape, outputs in arrivals:
        now_s += gap_s
        came.append((now_s, shape, outputs))
        monitor.arrived(request(shape, outputs=outputs), now_s)
    counted = [
        entry
        for index, entry in enumerate(came)
        if entry[0] > now_s - window_s or (index >= len(came) - min_arrivals and entry[0] > now_s - 5 * window_s)
    ]
    over_s = max(window_s, now_s - counted[0][0]) if counted else window_s
    expected: dict[WorkKind, float] = {}
    for _, shape, outputs in counted:
        kind = WorkKind("one", shape, 20)
        expected[kind] = expected.get(kind, 0) + outputs
    assert monitor.measure_load(now_s) == pytest.approx({kind: count / over_s for kind, count in expected.items()})
    assert list(monitor.measure_load(now_s)) == sorted(expected)
    assert monitor.measure_load(now_s + 6 * window_s) == {}


def test_a_quiet_models_window_reaches_further_back() -> None:
    monitor = Monitor({"slow": 10.0}, default_window_s=1.0, min_arrivals=2)
    for now_s in (0.0, 3.0, 20.0):
        monitor.arrived(request(model="slow"), now_s)
    assert monitor.choose_load_window_s("slow", 20.0) == 17.0
    assert monitor.measure_load(20.0) == {WorkKind("slow", SMALL, 20): 2 / 17}
    assert monitor.choose_load_window_s("never seen", 20.0) == 1.0


def test_rates_are_requests_per_gpu_second_over_all_stages_of_a_type() -> None:
    monitor = Monitor(min_requests=2)
    monitor.stage_finished(report(Stage.DIFFUSE, 2.0, 10.0, workers=2))
    monitor.stage_finished(report(Stage.DECODE, 1.0, 11.0))
    assert monitor.measure_rates(11.0) == {}  # one request is not enough
    monitor.stage_finished(report(Stage.DIFFUSE, 0.5, 20.0, workers=2))  # stopped and resumed: D counts twice
    monitor.stage_finished(report(Stage.DIFFUSE, 1.5, 25.0, workers=2))
    assert monitor.measure_rates(25.0) == {}
    monitor.stage_finished(report(Stage.DECODE, 1.0, 26.0))
    assert monitor.measure_rates(26.0) == {("one", PlacementType.DC): 2 / (4 + 1 + 1 + 3 + 1)}
    # The first request leaves the window: one is left.
    assert monitor.measure_rates(71.5) == {}


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.001, 100)), min_size=1, max_size=50))
def test_nothing_is_left_of_what_has_gone(done: list[tuple[float, float]]) -> None:
    monitor, now_s = Monitor(default_window_s=10.0, min_requests=1), 0.0
    for gap_s, seconds in done:
        now_s += gap_s
        monitor.stage_finished(report(Stage.DIFFUSE, seconds, now_s))
        monitor.stage_finished(report(Stage.DECODE, seconds, now_s))
    monitor.stage_finished(report(Stage.DIFFUSE, 3.0, now_s + 100.0))
    monitor.stage_finished(report(Stage.DECODE, 1.0, now_s + 100.0))
    assert monitor.measure_rates(now_s + 100.0) == {("one", PlacementType.DC): 0.25}


def test_windows_must_be_times() -> None:
    for window_s in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="window for one"):
            Monitor({"one": window_s})
    with pytest.raises(ConfigError, match="window for default"):
        Monitor(default_window_s=0.0)


def test_skew_compares_what_could_be_spared_with_what_is_slowest() -> None:
    assert compute_skew([]) == 1.0
    assert compute_skew([StageSpeed(8, 0.0), StageSpeed(1, 0.0)]) == 1.0  # idle
    assert compute_skew([StageSpeed(8, 4.0), StageSpeed(4, 2.0)]) == 1.0  # 8 workers at speed 2 can spare none
    assert compute_skew([StageSpeed(7, 7.0), StageSpeed(1, 0.05)]) == 1.0  # one encoder, hardly used, is not too many
    assert compute_skew([StageSpeed(7, 7.0), StageSpeed(2, 0.05)]) == 20.0
    assert compute_skew([StageSpeed(7, 7.0), StageSpeed(2, 0.0)]) == math.inf
    assert compute_skew([StageSpeed(0, 1.0), StageSpeed(2, 1.0)]) == math.inf


speeds = st.lists(st.builds(StageSpeed, st.integers(1, 100), st.floats(0.001, 100)), min_size=1, max_size=6)


@given(speeds, st.floats(0.01, 100))
def test_skew_does_not_depend_on_how_much_there_is_to_do(stages: list[StageSpeed], factor: float) -> None:
    assert compute_skew(stages) >= 1
    assert compute_skew([StageSpeed(s.workers, s.work * factor) for s in stages]) == pytest.approx(compute_skew(stages))


def test_noise_about_the_threshold_does_not_flap() -> None:
    trigger = SkewTrigger(ratio=1.5, release=1.2, hold_s=5.0, min_interval_s=30.0)
    assert not any(trigger.update(1.49, float(t)) for t in range(100))
    assert not any(trigger.update(1.6 if t % 4 else 1.1, 100.0 + t) for t in range(100))
    trigger.update(1.0, 200.0)
    fired = [t for t in range(100) if trigger.update(1.6 if t % 2 else 1.3, 201.0 + t)]
    assert fired == [6, 36, 66, 96]


def test_rest_starts_the_interval_anew() -> None:
    trigger = SkewTrigger(1.5, 1.2, hold_s=0.0, min_interval_s=30.0)
    trigger.rest(10.0)
    assert [t for t in range(10, 60) if trigger.update(2.0, float(t))] == [40]
    with pytest.raises(ConfigError, match="release"):
        SkewTrigger(ratio=1.2, release=1.5, hold_s=5.0, min_interval_s=30.0)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(1, 3)), max_size=60), st.floats(0, 20), st.floats(0, 60))
def test_the_trigger_keeps_its_interval_and_its_threshold(
    seen: list[tuple[float, float]], hold_s: float, min_interval_s: float
) -> None:
    trigger, now_s, last_s, highest = SkewTrigger(1.5, 1.2, hold_s, min_interval_s), 0.0, -math.inf, 0.0
    for gap_s, ratio in seen:
        now_s += gap_s
        highest = 0.0 if ratio < 1.2 else max(highest, ratio)
        if trigger.update(ratio, now_s):
            assert now_s - last_s >= min_interval_s
            assert highest >= 1.5
            last_s = now_s
