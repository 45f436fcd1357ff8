"""A policy that fails in a simulation ends nothing, as in the live engine (`tests/engine/live/test_core_thread.py`)."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from tests.scheduling.failing import FAILURE, REQUESTS, FailsAtFirst, check_failed_and_served, failing_scheduler
from tests.scheduling.fakes import FakeTimes
from tests.support.decision_log import read_log
from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions, SimulationResult
from tridentserve.testing import make_request


def simulate(failures: int, log: Path | None = None, solve_time: float = 0.0) -> tuple[SimulationResult, FailsAtFirst]:
    """All requests come at once; the policy fails the first times that it is asked."""
    scheduler, dispatcher, specs, placement = failing_scheduler()
    dispatcher.failures_left = failures
    options = SimulationOptions(
        handoff_capacity_bytes=16,
        group_bytes=0,
        max_idle_s=10.0,
        decision_log=log,
        keep_plans=True,
        solve_time=solve_time,
    )
    engine = SimulatedEngine(scheduler, specs, placement, FakeTimes(), options)
    return engine.run((0.0, make_request(name)) for name in REQUESTS), dispatcher


@pytest.mark.parametrize("solve_time", [0.0, 0.1])
def test_requests_wait_for_the_next_tick(solve_time: float, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "decisions.jsonl"
    with caplog.at_level(logging.ERROR):
        result, dispatcher = simulate(3, log, solve_time)
    check_failed_and_served(read_log(log), dispatcher)
    assert {one.outcome for one in result.requests} == {"finished"}
    assert result.counts.failed_ticks == 3
    # Each retry after the end of the tick before.
    first_start_s = min(plan.start_s for plan in result.plans)
    assert first_start_s == pytest.approx(3 * 0.25 + 4 * solve_time)
    (logged,) = caplog.records  # the same failure again is not logged again
    assert logged.exc_info is not None
    assert str(logged.exc_info[1]) == FAILURE


def test_a_policy_that_never_recovers_leaves_requests_unfinished(caplog: pytest.LogCaptureFixture) -> None:
    result, _ = simulate(10**9)
    assert [one.outcome for one in result.requests] == ["unfinished"] * len(REQUESTS)
    # Every 0.25 s for a second, and then whenever the time has grown by a quarter.
    assert result.counts.failed_ticks == pytest.approx(4 + math.log(10.0, 1.25), abs=3)
    assert len(caplog.records) == 1
