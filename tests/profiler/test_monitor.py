"""The Monitor: what the window holds is exact, and it is as long as the load has been the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.monitor import Monitor, StageSpeed, WorkKind, compute_skew
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


def weigh(kind: WorkKind) -> dict[Stage, float]:
    """GPU-seconds in proportion to tokens, D the most."""
    return {Stage.ENCODE: 0.01, Stage.DIFFUSE: kind.shape.tokens / 100, Stage.DECODE: kind.shape.tokens / 1000}


def draw_times_s(rate_per_s: float, start_s: float, end_s: float, rng: Random) -> Iterator[float]:
    now_s = start_s + rng.expovariate(rate_per_s)
    while now_s < end_s:
        yield now_s
        now_s += rng.expovariate(rate_per_s)


def ask(monitor: Monitor, shape: Shape, rate_per_s: float, start_s: float, end_s: float, rng: Random) -> None:
    for now_s in draw_times_s(rate_per_s, start_s, end_s, rng):
        monitor.arrived(request(shape), now_s)


events = st.lists(st.tuples(st.floats(0, 30), st.sampled_from([SMALL, LARGE]), st.integers(1, 3)), max_size=40)


@given(events, st.floats(1, 100))
def test_the_load_is_what_came_in_the_window(arrivals: list[tuple[float, Shape, int]], window_s: float) -> None:
    monitor, now_s, came = Monitor(default_window_s=window_s, shortest_window_s=window_s), 0.0, []
    for gap_s, shape, outputs in arrivals:
        now_s += gap_s
        came.append((now_s, shape, outputs))
        monitor.arrived(request(shape, outputs=outputs), now_s)
    loads = monitor.measure_load(now_s, weigh)
    if arrivals:
        over_s, slot_s = loads["one"].window_s, window_s / 8
        assert window_s * (1 - 1e-9) <= over_s < (window_s + slot_s) * (1 + 1e-9)
        expected: dict[WorkKind, float] = {}
        for time_s, shape, outputs in came:
            if math.floor(time_s / slot_s) >= math.floor(now_s / slot_s) - 8:
                kind = WorkKind("one", shape, 20)
                expected[kind] = expected.get(kind, 0) + outputs
        assert loads["one"].per_s == pytest.approx({kind: count / over_s for kind, count in expected.items()})
        assert list(loads["one"].per_s) == sorted(expected)
    assert monitor.measure_load(now_s + 6 * window_s, weigh) == {}


@settings(max_examples=10)
@given(st.integers(0, 1000), st.floats(0.2, 10))
def test_the_window_is_long_while_nothing_changes(seed: int, rate_per_s: float) -> None:
    monitor, rng, lengths_s = Monitor(), Random(seed), []
    for index in range(60):
        ask(monitor, SMALL, rate_per_s, 10.0 * index, 10.0 * (index + 1), rng)
        lengths_s += [load.window_s for load in monitor.measure_load(10.0 * (index + 1), weigh).values()]
    assert sum(length_s > 140 for length_s in lengths_s[30:]) >= 20
    assert max(lengths_s) <= 300 + 300 / 128


@settings(max_examples=10)
@given(st.integers(0, 1000), st.floats(1, 10))
def test_the_window_ends_where_the_load_has_changed(seed: int, rate_per_s: float) -> None:
    monitor, rng = Monitor(), Random(seed)
    ask(monitor, SMALL, rate_per_s, 0.0, 600.0, rng)
    ask(monitor, LARGE, rate_per_s, 600.0, 640.0, rng)
    load = monitor.measure_load(640.0, weigh)["one"]
    assert not load.is_steady
    assert load.window_s < 80
    assert load.per_s[WorkKind("one", LARGE, 20)] > load.per_s.get(WorkKind("one", SMALL, 20), 0)


def test_what_grows_is_expected_to_grow_on_and_never_to_be_less_than_nothing() -> None:
    monitor = Monitor(default_window_s=100.0, shortest_window_s=100.0)
    falling, growing = WorkKind("one", SMALL, 20), WorkKind("one", LARGE, 20)
    for second in range(100):
        monitor.arrived(request(LARGE, outputs=1 + second // 10), second + 0.5)
        monitor.arrived(request(SMALL, outputs=10 - second // 10), second + 0.5)
    load = monitor.measure_load(100.0, weigh)["one"]
    assert load.growth[growing] > 0 > load.growth[falling]
    ahead = load.expect(ahead_s=1000.0)
    assert ahead[growing] > load.expect(ahead_s=0.0)[growing] > load.per_s[growing]
    assert ahead[falling] == 0.0


def test_chance_is_no_trend() -> None:
    monitor = Monitor(default_window_s=100.0, shortest_window_s=100.0)
    for second in (0, 40, 60, 70, 80, 90):  # two, then four
        monitor.arrived(request(), float(second))
    load = monitor.measure_load(99.0, weigh)["one"]
    assert load.growth == {}
    assert load.expect(1000.0) == load.per_s


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
    assert monitor.measure_rates(320.0) == {}


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


def test_what_chance_explains_is_no_skew() -> None:
    # 40 requests of 10 GPU-seconds in 100 s: the error is 0.63 of 4 GPU-seconds per second.
    stages = [StageSpeed(3, 4.0, 40.0), StageSpeed(4, 2.0)]
    assert compute_skew(stages) == pytest.approx(2.0)
    assert compute_skew(stages, 100.0, errors=1.0) == pytest.approx(1.5 * (4 - 0.4**0.5) / 3)
    assert compute_skew(stages, 1.0, errors=1.0) == 1.0
    assert compute_skew(stages, 1e9, errors=1.0) == pytest.approx(2.0, rel=1e-3)
