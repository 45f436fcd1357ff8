"""Medians, spreads and percentiles of measured times, as they are printed, and how sure a figure is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from random import Random

_RESAMPLES = 1000
CONFIDENCE = 0.95


def summarize_ms(samples_s: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and range."""
    ordered = sorted(samples_s)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    named = {"p50_ms": statistics.median(ordered), "p99_ms": p99, "min_ms": ordered[0], "max_ms": ordered[-1]}
    return {name: round(1000 * seconds, 3) for name, seconds in named.items()}


def compute_median_ms(samples_s: Sequence[float]) -> float:
    return round(1000 * statistics.median(samples_s), 3)


def compute_interval(values: Sequence[float], statistic: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    """The bootstrap interval of a statistic, at `CONFIDENCE`: from values drawn again and again from those that there
    are (Efron and Tibshirani, An Introduction to the Bootstrap, 1993)."""
    rng = Random(0)
    drawn = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    tail = round((1 - CONFIDENCE) / 2 * _RESAMPLES)
    return drawn[tail], drawn[-1 - tail]
