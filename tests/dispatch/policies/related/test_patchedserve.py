"""PatchedServe in action: slack, throughput mode, the schedulability test, and the requests that are given up."""

from __future__ import annotations

import pytest

from dispatch.policies.related.patchedserve import PatchedServe
from tests.dispatch.cluster import request, worker, workers
from tests.dispatch.policies.step_engine import BATCHES, LARGE, SMALL, TIMES, StepEngine, running
from tests.profiler.synthetic import step_seconds
from tridentserve.protocols import ClusterView, PendingRequest
from tridentserve.requests import Shape
from tridentserve.stages import Stage

POLICY = PatchedServe(TIMES, BATCHES)
ONE_BUSY = [worker("n0-w0", "EDC", free_at_s=9.0)]


def alone_s(shape: Shape, steps: int = 20) -> float:
    return 0.02 + steps * step_seconds(shape, 1) + TIMES.seconds("one", Stage.DECODE, shape)


def test_the_hopeless_is_discarded_and_what_has_begun_is_not() -> None:
    late = request("late", LARGE, alone_s(LARGE) - 0.1)
    begun = PendingRequest(request("begun", LARGE, 0.1, steps_done=5).spec, 0.0, 0.1, 5, True, "n0-w0")
    decisions = POLICY.decide(ClusterView(0.0, [late, begun], (), workers(1, "EDC")))
    (refusal,) = decisions.refusals
    assert refusal.request_id == "late"
    assert "late by 0.10 s" in refusal.reason
    assert [each.request_ids for each in decisions.assignments] == [("begun",)]


def test_the_urgent_go_by_slack_and_the_relaxed_by_what_a_batch_gains() -> None:
    urgent = request("urgent", LARGE, 1.5 * alone_s(LARGE))
    large, small = request("large", LARGE, 20 * alone_s(LARGE)), request("small", SMALL, 90 * alone_s(LARGE))
    one = workers(1, "EDC")
    (first,) = POLICY.decide(ClusterView(0.0, [small, large, urgent], (), one)).assignments
    assert first.request_ids == ("urgent",)
    (first,) = POLICY.decide(ClusterView(0.0, [large, small], (), one)).assignments
    assert first.request_ids == ("small",)


@pytest.mark.parametrize(("slack_s", "joins"), [(5.0, True), (0.002, False)])
def test_a_request_joins_unless_somebody_in_the_batch_gets_late(slack_s: float, joins: bool) -> None:
    old = request("old", SMALL, alone_s(SMALL) - 0.02 + slack_s)
    decisions = POLICY.decide(ClusterView(0.0, [request("new", SMALL)], [running(old, "n0-w0")], ONE_BUSY))
    assert [each.request_ids for each in decisions.assignments if each.takes_over] == (
        [("old", "new")] if joins else []
    )
    assert not decisions.preemptions


def test_a_joined_batch_stays_where_it_was() -> None:
    engine = StepEngine(PatchedServe(TIMES, BATCHES), workers(2, "EDC"))
    requests = [request("a", SMALL, steps=40), request("b", LARGE), request("c", SMALL, steps=30, arrival_s=0.04)]
    engine.play(requests)
    where = {each.diffuse for _, each in engine.log if "a" in each.request_ids}
    assert len(where) == 1
    assert {"a", "c"} in [set(each.request_ids) for _, each in engine.log]
    assert not engine.refused


def test_idle_workers_come_before_joining() -> None:
    views = [*ONE_BUSY, *workers(1, "EDC", first=1)]
    decisions = POLICY.decide(
        ClusterView(0.0, [request("new", SMALL)], [running(request("old", SMALL), "n0-w0")], views)
    )
    assert decisions.preemptions == ()
    assert decisions.assignments[0].diffuse == ("n0-w1",)
