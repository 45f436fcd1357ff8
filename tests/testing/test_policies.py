"""The public helpers, as the author of a policy uses them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.policy_page import ROOT, write_policy, write_test
from tests.support.processes import output_of
from tridentserve.engine.simulated import SimulationOptions, WorkerFailure
from tridentserve.errors import ProfileError
from tridentserve.protocols import Assignment, ClusterView, Decisions, WorkerView
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage
from tridentserve.testing import FixedTimes, find_violations, make_cluster, make_request, simulate_dispatcher


class FirstComeFirstServed:
    """Each request runs on one worker, in the order of arrival."""

    def decide(self, view: ClusterView) -> Decisions:
        idle = [worker.worker_id for worker in view.workers if worker.idle]
        waiting = sorted(view.pending, key=lambda request: request.arrival_s)
        return Decisions(
            [
                Assignment(
                    request_ids=(request.spec.request_id,),
                    primary=PlacementType.EDC,
                    encode=() if request.encoded else (worker,),
                    diffuse=(worker,),
                    decode=(worker,),
                    expected_finish_s=view.now_s,
                    reason="first come, first served",
                )
                for request, worker in zip(waiting, idle, strict=False)
            ]
        )

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return None if workers else "there are no workers"


def test_a_policy_is_simulated_in_one_call() -> None:
    result, workers = simulate_dispatcher(
        FirstComeFirstServed(), {"a": "EDC", "n1/b": "EDC"}, {"r0": 0.0, "r1": 0.0, "r2": 1.0}
    )
    assert [(worker.worker_id, worker.node_id) for worker in workers] == [("a", "n0"), ("n1/b", "n1")]
    assert find_violations(result, workers) == []
    # E 0.5 s, four steps of 1 s, C 2 s; the third request waits for a worker.
    assert [request.end_s for request in result.requests] == pytest.approx([6.5, 6.5, 13.0], abs=0.02)
    assert {plan.workers for plan in result.plans} == {("a",), ("n1/b",)}


def test_times_and_failures_can_be_chosen() -> None:
    times = FixedTimes(encode_s=0.0, step_s=0.5, decode_s=1.0)
    failures = (WorkerFailure(time_s=1.0, worker_id="a", down_s=2.0),)
    options = SimulationOptions(keep_plans=True, failures=failures)
    result, workers = simulate_dispatcher(FirstComeFirstServed(), {"a": "EDC"}, {"r": 0.0}, times, options=options)
    assert find_violations(result, workers) == []
    assert (result.counts.worker_losses, result.counts.retries, result.outcomes["finished"]) == (1, 1, 1)
    assert result.requests[0].end_s == pytest.approx(6.0, abs=0.02), "three seconds after it is back"
    assert {stage for stage, *_ in times.observed} == set(Stage)


def test_a_broken_rule_is_found() -> None:
    result, workers = simulate_dispatcher(FirstComeFirstServed(), {"a": "EDC"}, {"r": 0.0})
    twice = replace(result, plans=[*result.plans, replace(result.plans[0], plan_id=99)])
    assert find_violations(twice, workers) == ["a began plan 99 before the end of plan 2"]


def test_clusters_requests_and_times_are_as_described() -> None:
    workers, placement = make_cluster({"a": "DC", "b": ""}, memory_bytes=64)
    assert [worker.memory_bytes for worker in workers] == [64, 64]
    assert (placement.describe("a"), placement.describe("b")) == ("m:DC", "empty")
    request = make_request("r", steps=7, slo_s=3.0, shape=Shape(64, 32))
    assert (request.num_inference_steps, request.slo_s, request.shape) == (7, 3.0, Shape(64, 32))
    times = FixedTimes()
    assert times.seconds("m", Stage.DIFFUSE, request.shape, degree=4, batch=2) == 0.5
    with pytest.raises(ProfileError, match="decode was not profiled at degree 2"):
        times.seconds("m", Stage.DECODE, request.shape, degree=2)


def test_the_documented_test_passes(tmp_path: Path) -> None:
    """The one of docs/write-a-policy.md, beside the policy of that page."""
    write_policy(tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(write_test(tmp_path))]
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    assert "1 passed" in output_of(command, tmp_path, {**os.environ, "PYTHONPATH": path})
