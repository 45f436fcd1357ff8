"""Arrival processes as pure functions from a rate, a duration and a seed to sorted times.

All but `constant` are stationary from time 0 on: the first interval is the rest of one that began earlier, so that the
expected number of arrivals is rate x duration even for a bursty process and a short duration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Literal, get_args

from tridentserve.errors import ConfigError

Process = Literal["constant", "poisson", "gamma", "weibull", "diurnal"]

# Coefficients of variation of intervals that are taken (up to 15 was seen in production), and shapes of the Weibull
# distribution that cover them.
MIN_CV, MAX_CV = 0.02, 100.0
_WEIBULL_SHAPES = (0.1, 100.0)


# One arrival in thirty million years: as good as none, and its intervals may not be finite numbers.
_LEAST_RATE_PER_S = 1e-15


def draw_constant(rate_per_s: float, duration_s: float) -> list[float]:
    """Equal intervals, the first arrival at 0."""
    _check(rate_per_s=rate_per_s, duration_s=duration_s)
    if rate_per_s < _LEAST_RATE_PER_S:
        return []
    times_s = (index / rate_per_s for index in range(math.ceil(rate_per_s * duration_s)))
    return [time_s for time_s in times_s if time_s < duration_s]


def draw_poisson(rate_per_s: float, duration_s: float, seed: int) -> list[float]:
    """Intervals that are independent and exponential: a coefficient of variation (CV) of 1."""
    return draw_gamma(rate_per_s, duration_s, seed, cv=1.0)


def draw_gamma(rate_per_s: float, duration_s: float, seed: int, cv: float) -> list[float]:
    """Intervals from a Gamma distribution; a CV above 1 is burstier than Poisson, below 1 more regular."""
    _check(rate_per_s=rate_per_s, duration_s=duration_s)
    if rate_per_s < _LEAST_RATE_PER_S:
        return []
    shape = 1 / _check_cv(cv) ** 2
    scale_s = 1 / (rate_per_s * shape)
    rng = Random(seed)
    # The interval that covers time 0 is length-biased: x f(x) of a Gamma is a Gamma of the next shape.
    first_s = rng.random() * rng.gammavariate(shape + 1, scale_s)
    return _draw_renewals(first_s, lambda: rng.gammavariate(shape, scale_s), duration_s)


def draw_weibull(rate_per_s: float, duration_s: float, seed: int, cv: float) -> list[float]:
    """Intervals from a Weibull distribution of this CV (1: Poisson)."""
    _check(rate_per_s=rate_per_s, duration_s=duration_s)
    if rate_per_s < _LEAST_RATE_PER_S:
        return []
    shape = _find_weibull_shape(_check_cv(cv))
    scale_s = 1 / (rate_per_s * math.gamma(1 + 1 / shape))
    rng = Random(seed)
    # Length-biased: (x / scale)^shape, an exponential for f(x), is a Gamma of shape 1 + 1 / shape for x f(x).
    first_s = rng.random() * scale_s * rng.gammavariate(1 + 1 / shape, 1.0) ** (1 / shape)
    return _draw_renewals(first_s, lambda: rng.weibullvariate(scale_s, shape), duration_s)


def draw_diurnal(
    rate_per_s: float, duration_s: float, seed: int, period_s: float = 86400.0, peak_to_trough: float = 4.0
) -> list[float]:
    """Poisson arrivals whose rate swings as a cosine, from the trough at time 0 to the peak after half a period.

    `rate_per_s` is the mean over whole periods.
    """
    _check(rate_per_s=rate_per_s, duration_s=duration_s)
    if not (math.isfinite(period_s) and period_s > 0 and math.isfinite(peak_to_trough) and peak_to_trough >= 1):
        raise ConfigError(
            f"the period must be above 0 and the peak at least the trough, not {period_s}, {peak_to_trough}"
        )
    swing = (peak_to_trough - 1) / (peak_to_trough + 1)
    rng = Random(seed)

    def share_of_peak(time_s: float) -> float:
        return (1 - swing * math.cos(2 * math.pi * time_s / period_s)) / (1 + swing)

    candidates_s = draw_poisson(rate_per_s * (1 + swing), duration_s, rng.getrandbits(63))
    return [time_s for time_s in candidates_s if rng.random() < share_of_peak(time_s)]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a published trace: its arrival in seconds, and its denoising steps where the trace has them."""

    time_s: float
    num_inference_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time with one arrival process. `cv` is for Gamma and Weibull."""

    duration_s: float
    rate_per_s: float
    process: Process = "poisson"
    cv: float = 1.0


def draw_phases(steps: Sequence[Phase], seed: int) -> list[float]:
    """One phase after another, each with a seed of its own."""
    rng = Random(seed)
    starts_s = accumulate((step.duration_s for step in steps), initial=0.0)
    return [
        start_s + time_s
        for start_s, step in zip(starts_s, steps, strict=False)
        for time_s in draw_arrival_times(step.process, step.rate_per_s, step.duration_s, rng.getrandbits(63), step.cv)
    ]


def draw_arrival_times(
    process: Process, rate_per_s: float, duration_s: float, seed: int = 0, cv: float = 1.0
) -> list[float]:
    """Arrivals in [0, duration_s), ascending, of the process of this name; a diurnal one has one period.

    Raises `ConfigError` for an unknown name, and for a rate, duration or CV that no process can have.
    """
    match process:
        case "constant":
            return draw_constant(rate_per_s, duration_s)
        case "poisson":
            return draw_poisson(rate_per_s, duration_s, seed)
        case "gamma":
            return draw_gamma(rate_per_s, duration_s, seed, cv)
        case "weibull":
            return draw_weibull(rate_per_s, duration_s, seed, cv)
        case "diurnal":
            return draw_diurnal(rate_per_s, duration_s, seed, period_s=max(duration_s, math.ulp(1.0)))
    raise ConfigError(f"unknown arrival process {process!r}: choose one of {', '.join(get_args(Process))}")


def _draw_renewals(first_s: float, interval_s: Callable[[], float], duration_s: float) -> list[float]:
    times_s = []
    time_s = first_s
    while time_s < duration_s:
        times_s.append(time_s)
        time_s += interval_s()
    return times_s


def _find_weibull_shape(cv: float) -> float:
    """The shape whose CV this is; the CV falls as the shape grows, so it is found by halving."""

    def cv_of(shape: float) -> float:
        return math.sqrt(math.expm1(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)))

    low, high = _WEIBULL_SHAPES
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cv_of(middle) > cv else (low, middle)
    return (low + high) / 2


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be finite and not negative, not {value}")


def _check_cv(cv: float) -> float:
    if not MIN_CV <= cv <= MAX_CV:
        raise ConfigError(f"the coefficient of variation must be from {MIN_CV:g} to {MAX_CV:g}, not {cv}")
    return cv
