"""The standings of a contest of policies."""

from __future__ import annotations

import math

from lib.compare.contest import ContestRun
from lib.compare.standings import format_standings, summarize


def make_run(policy: str, repetition: int, on_time: float, *latencies_s: float, failed: int = 0) -> ContestRun:
    return ContestRun(policy, "bursty", repetition, on_time, latencies_s, failed)


def test_figures_are_means_and_ratios_over_the_repetitions() -> None:
    runs = [
        make_run("b6", 1, 0.5, 4.0, 4.0),
        make_run("default", 0, 1.0, 1.0, 3.0),
        make_run("b6", 0, 0.5, 2.0, 4.0),
        make_run("default", 1, 0.75, 2.0, 2.0),
    ]
    first, second = summarize(runs, ["default", "b6"])
    assert (first["trace"], first["policy"], second["policy"]) == ("bursty", "default", "b6")
    assert first["on_time"] == {"mean": 0.875, "min": 0.75, "max": 1.0}
    assert first["mean_s"] == {"mean": 2.0, "min": 2.0, "max": 2.0}
    assert (first["behind"], first["mean_ratio"], first["p95_ratio"]) == (0.0, 1.0, 1.0)
    # Repetition by repetition: 3 over 2 and 4 over 2; P95 3.9 over 2.9 and 4 over 2.
    assert (second["behind"], second["mean_ratio"]) == (0.375, 1.75)
    assert math.isclose(second["p95_ratio"], (3.9 / 2.9 + 2.0) / 2, abs_tol=1e-4)
    assert "b6" in format_standings([first, second]).splitlines()[2]


def test_a_run_in_which_all_failed_has_no_latency() -> None:
    (row,) = summarize([make_run("default", 0, 0.0, failed=3)], ["default"])
    assert math.isnan(row["mean_s"]["mean"])
    assert row["on_time"]["mean"] == 0.0
