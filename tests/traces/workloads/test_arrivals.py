from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, pstdev
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.workloads.arrivals import (
    Phase,
    Process,
    draw_arrival_times,
    draw_constant,
    draw_diurnal,
    draw_gamma,
    draw_phases,
    draw_poisson,
)
from tridentserve.errors import ConfigError

PROCESSES = st.sampled_from(get_args(Process))
SEEDS = st.integers(0, 2**63)


def cv_of(times_s: list[float]) -> float:
    intervals_s = [after - before for before, after in pairwise(times_s)]
    return pstdev(intervals_s) / fmean(intervals_s)


@given(PROCESSES, st.floats(0, 20), st.floats(0, 50), SEEDS, st.floats(0.1, 10))
def test_times_are_sorted_inside_the_duration_and_the_same_for_a_seed(
    process: Process, rate_per_s: float, duration_s: float, seed: int, cv: float
) -> None:
    times_s = draw_arrival_times(process, rate_per_s, duration_s, seed, cv)
    assert times_s == sorted(times_s)
    assert all(0 <= time_s < duration_s for time_s in times_s)
    assert times_s == draw_arrival_times(process, rate_per_s, duration_s, seed, cv)


@given(st.floats(0.01, 50), st.floats(0, 100))
def test_constant_arrivals_are_equally_far_apart(rate_per_s: float, duration_s: float) -> None:
    times_s = draw_constant(rate_per_s, duration_s)
    assert len(times_s) == pytest.approx(rate_per_s * duration_s, abs=1.001)
    assert times_s == pytest.approx([index / rate_per_s for index in range(len(times_s))])


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("process", ["gamma", "weibull"])
def test_renewal_processes_have_the_rate_and_the_cv(process: Process, cv: float) -> None:
    times_s = draw_arrival_times(process, 4.0, 20_000.0, seed=1, cv=cv)
    assert len(times_s) / 20_000 == pytest.approx(4.0, rel=0.05)
    assert cv_of(times_s) == pytest.approx(cv, rel=0.05)


def test_poisson_has_a_cv_of_1_and_a_variance_like_its_mean() -> None:
    assert cv_of(draw_poisson(5.0, 10_000.0, seed=3)) == pytest.approx(1.0, rel=0.03)
    counts = [len(draw_poisson(2.0, 50.0, seed)) for seed in range(500)]
    assert pstdev(counts) ** 2 == pytest.approx(100, rel=0.2)


@pytest.mark.parametrize("process", ["gamma", "weibull"])
def test_a_bursty_process_has_its_rate_from_the_first_second_on(process: Process) -> None:
    # Were each seed to begin with a fresh interval, a CV of 3 would give (3^2 - 1) / 2 = 4 arrivals too many.
    counts = [len(draw_arrival_times(process, 0.5, 20.0, seed, cv=3.0)) for seed in range(4000)]
    assert fmean(counts) == pytest.approx(10.0, abs=0.9)


def test_diurnal_arrivals_swing_between_trough_and_peak() -> None:
    times_s = draw_diurnal(10.0, 7200.0, seed=5, period_s=3600.0, peak_to_trough=4.0)
    assert len(times_s) / 7200 == pytest.approx(10.0, rel=0.05)

    def rate_near(moment_s: float) -> float:
        return sum(abs(time_s % 3600 - moment_s) < 180 for time_s in times_s) / 720

    assert rate_near(1800) / (rate_near(0) + rate_near(3600)) == pytest.approx(4.0, rel=0.15)


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 5)), max_size=5), SEEDS)
def test_phases_follow_each_other(steps: list[tuple[int, float]], seed: int) -> None:
    times_s = draw_phases([Phase(duration_s, rate, "constant") for duration_s, rate in steps], seed)
    assert times_s == sorted(times_s)
    start_s = 0.0
    for duration_s, rate in steps:
        inside = sum(start_s <= time_s < start_s + duration_s for time_s in times_s)
        assert inside == pytest.approx(rate * duration_s, abs=2)
        start_s += duration_s


def test_what_no_process_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="rate_per_s must be finite and not negative, not -1"):
        draw_poisson(-1.0, 10.0, 0)
    with pytest.raises(ConfigError, match="duration_s"):
        draw_constant(1.0, math.inf)
    with pytest.raises(ConfigError, match="coefficient of variation"):
        draw_gamma(1.0, 10.0, 0, cv=0.0)
    with pytest.raises(ConfigError, match="peak at least the trough"):
        draw_diurnal(1.0, 10.0, 0, peak_to_trough=0.5)
    with pytest.raises(ConfigError, match="unknown arrival process 'bursts'"):
        draw_arrival_times("bursts", 1.0, 1.0)  # type: ignore[arg-type]
