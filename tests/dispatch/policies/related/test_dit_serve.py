"""DiT-Serve in action: the shortest first, joins at step boundaries, rings by length."""

from __future__ import annotations

from dispatch import DispatchOptions
from dispatch.policies.related.dit_serve import DitServe
from tests.dispatch.cluster import request, worker, workers
from tests.dispatch.policies.step_engine import BATCHES, LARGE, MIDDLE, SMALL, TIMES, StepEngine, running
from tridentserve.protocols import ClusterView

POLICY = DitServe(TIMES, BATCHES)
ONE_BUSY = [worker("n0-w0", "EDC", free_at_s=9.0)]


def test_rings_are_in_proportion_to_the_length() -> None:
    pending = [request("long", LARGE), request("middle", MIDDLE), request("short", SMALL)]
    decisions = POLICY.decide(ClusterView(0.0, pending, (), workers(8, "EDC")))
    assert {each.request_ids[0]: len(each.diffuse) for each in decisions.assignments} == {
        "short": 1,
        "middle": 2,
        "long": 4,
    }


def test_the_shortest_remaining_processing_time_goes_first() -> None:
    pending = [request("a", SMALL, steps=50), request("b", SMALL, steps=50, steps_done=45), request("c", MIDDLE)]
    (assignment,) = (
        DitServe(TIMES, DispatchOptions(max_batch=1))
        .decide(ClusterView(0.0, pending, (), workers(1, "EDC")))
        .assignments
    )
    assert assignment.request_ids == ("b",)


def test_a_request_joins_a_running_batch_at_its_next_step_boundary() -> None:
    view = ClusterView(0.0, [request("new", SMALL)], [running(request("old", SMALL), "n0-w0")], ONE_BUSY)
    (preemption,) = POLICY.decide(view).preemptions
    assert preemption.request_id == "old"
    assert "new joins" in preemption.reason
    engine = StepEngine(DitServe(TIMES, BATCHES), workers(1, "EDC"))
    engine.play([request("old", SMALL, steps=20), request("new", SMALL, steps=5, arrival_s=0.03)])
    batches = [set(each.request_ids) for _, each in engine.log]
    assert batches == [{"old"}, {"old", "new"}, {"old"}]
    assert engine.finish_s["new"] < engine.finish_s["old"]


def test_a_size_that_gains_nothing_from_batches_does_not_join() -> None:
    old = request("old", LARGE, steps_done=10)
    assert POLICY.decide(ClusterView(0.0, [request("new", LARGE)], [running(old, "n0-w0")], ONE_BUSY)).preemptions == ()


def test_a_longer_batch_is_stopped_for_a_shorter_request_but_not_the_reverse() -> None:
    long, short = request("long", LARGE), request("short", MIDDLE, steps=5)
    (preemption,) = POLICY.decide(ClusterView(0.0, [short], [running(long, "n0-w0")], ONE_BUSY)).preemptions
    assert preemption.request_id == "long"
    assert POLICY.decide(ClusterView(0.0, [long], [running(short, "n0-w0")], ONE_BUSY)).preemptions == ()


def test_one_stopped_batch_is_enough_for_one_request() -> None:
    active = [running(request(f"l{i}", LARGE), f"n0-w{i}") for i in range(2)]
    busy = [worker(f"n0-w{i}", "EDC", free_at_s=9.0) for i in range(2)]
    decisions = POLICY.decide(ClusterView(0.0, [request("short", SMALL)], active, busy))
    assert len(decisions.preemptions) == 1


def test_a_ring_that_does_not_fit_runs_one_step_on_what_is_idle() -> None:
    short = running(request("short", SMALL, steps=2), "n0-w0")
    views = [worker("n0-w0", "EDC", free_at_s=9.0), *workers(3, "EDC", first=1)]
    (assignment,) = POLICY.decide(ClusterView(0.0, [request("long", LARGE)], [short], views)).assignments
    assert len(assignment.diffuse) == 2
    assert assignment.num_steps == 1
