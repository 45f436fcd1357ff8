"""Medians, spreads and percentiles of measured times, as they are printed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def summarize_ms(samples_s: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and range."""
    ordered = sorted(samples_s)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    named = {"p50_ms": statistics.median(ordered), "p99_ms": p99, "min_ms": ordered[0], "max_ms": ordered[-1]}
    return {name: round(1000 * seconds, 3) for name, seconds in named.items()}


def compute_median_ms(samples_s: Sequence[float]) -> float:
    return round(1000 * statistics.median(samples_s), 3)
