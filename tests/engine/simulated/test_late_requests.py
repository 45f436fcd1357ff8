"""Requests that ask to be refused or made with less work where they would be late, and those of a higher priority, in
simulations with the planners of the service."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deployments.assembly.simulation import SimulationSetup, simulate
from tests.dispatch.policies.scenes import cluster
from tests.profiler.synthetic import EDC_BYTES, SHAPES, cost_model
from tests.support.decision_log import read_log
from tridentserve.engine.simulated import RequestResult, SimulationOptions, SimulationResult, TimedRequest
from tridentserve.engine.simulated.result import FINISHED
from tridentserve.models.step_cache import EXPECTED_SHARES
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.stages import Stage
from tridentserve.testing import find_violations

WORKERS = cluster(1, memory_bytes=2 * EDC_BYTES)
PLAIN = RequestSpec("plain", "one", SHAPES[2], 20, slo_s=100.0)


def serve(*arrivals: TimedRequest, decision_log: Path | None = None) -> SimulationResult:
    """On one worker."""
    options = SimulationOptions(keep_plans=True, decision_log=decision_log)
    result = simulate(arrivals, SimulationSetup(WORKERS, cost_model, engine=options))
    assert find_violations(result, WORKERS) == []
    return result


def find_latency_s() -> float:
    """Seconds that `PLAIN` takes alone."""
    (alone,) = serve((0.0, PLAIN)).requests
    assert alone.latency_s is not None
    return alone.latency_s


def get_steps(result: RequestResult) -> int:
    return sum(run.steps or 0 for run in result.timeline)


def test_a_request_that_would_be_late_is_refused_at_once_with_its_time() -> None:
    alone_s = find_latency_s()
    first, late = replace(PLAIN, request_id="first"), replace(PLAIN, request_id="late", slo_s=alone_s)
    without, refused, waited = (
        serve((0.0, first), *rest)
        for rest in ([], [(0.5, replace(late, on_late="refuse"))], [(0.5, replace(late, on_late="wait"))])
    )
    result = refused.requests[1]
    assert (result.outcome, result.end_s, result.start_s, result.timeline) == ("deadline_missed", 0.5, None, ())
    assert result.predicted_s is not None
    assert result.predicted_s > alone_s
    assert result.error is not None
    assert f"predicted to end {result.predicted_s:.2f} s after its arrival" in result.error
    # No worker did anything for it, and the other request had all that it has alone.
    assert (refused.plans, refused.busy_seconds) == (without.plans, without.busy_seconds)
    assert refused.requests[0] == without.requests[0]
    assert (waited.requests[1].outcome, waited.requests[1].slo_met) == (FINISHED, False)


def test_a_request_that_would_be_in_time_is_not_refused() -> None:
    (result,) = serve((0.0, replace(PLAIN, slo_s=1.5 * find_latency_s(), on_late="refuse"))).requests
    assert (result.outcome, result.slo_met, get_steps(result)) == (FINISHED, True, 20)


def test_a_request_that_would_be_late_has_fewer_steps_where_it_asks_for_that(tmp_path: Path) -> None:
    alone_s = find_latency_s()
    spec, log = replace(PLAIN, on_late="degrade", slo_s=0.8 * alone_s), tmp_path / "decisions.jsonl"
    (result,) = serve((0.0, spec), decision_log=log).requests
    assert result.reduced_steps is not None
    assert 10 <= result.reduced_steps < 20
    assert get_steps(result) == result.reduced_steps
    assert (result.outcome, result.slo_met, result.quality) == (FINISHED, True, "exact")
    assert result.spec == spec, "the result says what was asked for"
    effects = [effect for entry in read_log(log) for effect in entry.effects if isinstance(effect, ev.Degrade)]
    assert [(effect.request_id, effect.num_inference_steps) for effect in effects] == [("plain", result.reduced_steps)]
    # One that would be late even so, and one that is in time as it is, have all their steps.
    for slo_s, is_met in ((0.1 * alone_s, False), (2 * alone_s, True)):
        (whole,) = serve((0.0, replace(spec, slo_s=slo_s))).requests
        assert (whole.reduced_steps, get_steps(whole), whole.slo_met) == (None, 20, is_met)


def test_a_request_that_would_be_late_has_a_lower_quality_before_fewer_steps() -> None:
    alone_s = find_latency_s()
    spec = replace(PLAIN, on_late="degrade", cheaper_quality="fast")
    (exact,) = serve((0.0, replace(spec, slo_s=2 * alone_s))).requests
    (fast,) = serve((0.0, replace(spec, slo_s=0.8 * alone_s))).requests
    (fewer,) = serve((0.0, replace(spec, slo_s=0.5 * alone_s))).requests
    assert (exact.quality, exact.reduced_steps) == ("exact", None)
    assert (fast.quality, fast.reduced_steps, get_steps(fast), fast.slo_met) == ("fast", None, 20, True)
    assert (fewer.quality, fewer.slo_met) == ("fast", True)
    assert fewer.reduced_steps is not None
    seconds = [
        sum(run.end_s - run.start_s for run in each.timeline if run.stage is Stage.DIFFUSE) for each in (exact, fast)
    ]
    assert seconds[1] == pytest.approx(EXPECTED_SHARES["fast"] * seconds[0])


@pytest.mark.parametrize("slo_s", [100.0, 3.0])
def test_of_two_waiting_requests_the_one_of_the_higher_priority_starts_first(slo_s: float) -> None:
    """Whether both can be in time or not."""

    def list_order(priority: int) -> list[str]:
        """The two that wait in order of start."""
        names = ("earlier", 0), ("later", priority)
        waiting = [replace(PLAIN, request_id=name, priority=rank, slo_s=slo_s) for name, rank in names]
        result = serve((0.0, replace(PLAIN, request_id="first")), (0.1, waiting[0]), (0.2, waiting[1]))
        starts = {each.spec.request_id: each.start_s for each in result.requests[1:]}
        assert [each.outcome for each in result.requests] == [FINISHED] * 3
        return sorted(starts, key=lambda name: starts[name] or 0.0)

    assert list_order(0) == list_order(-1) == ["earlier", "later"]
    assert list_order(1) == ["later", "earlier"]
