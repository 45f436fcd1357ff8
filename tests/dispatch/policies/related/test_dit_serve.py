"""DiT-Serve in action: the shortest first, joins at step boundaries, rings by length, and its other orders."""

from __future__ import annotations

import pytest

from dispatch import DispatchOptions
from dispatch.policies.related.dit_serve import DitServe
from dispatch.policies.related.job_orders import JOB_ORDERS
from tests.dispatch.cluster import request, worker, workers
from tests.dispatch.policies.step_engine import BATCHES, LARGE, MIDDLE, SMALL, TIMES, StepEngine, running
from tridentserve.protocols import ClusterView

SRPTF = JOB_ORDERS["srptf"]
POLICY = DitServe(TIMES, BATCHES, SRPTF)
ALONE = DispatchOptions(max_batch=1)
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
    view = ClusterView(0.0, pending, (), workers(1, "EDC"))
    (assignment,) = DitServe(TIMES, ALONE, SRPTF).decide(view).assignments
    assert assignment.request_ids == ("b",)


@pytest.mark.parametrize(
    ("order", "served"),
    [
        ("srptf", ["small-tail", "middle", "small", "large-tail"]),  # 5 x 1, 10 x 4, 50 x 1, and 4 x 16 lengths
        ("srtf", ["large-tail", "small-tail", "middle", "small"]),  # 4, 5, 10 and 50 steps left
        ("sjf", ["middle", "large-tail", "small", "small-tail"]),  # 10, 20, 50 and 60 steps in all
        ("fcfs", ["small", "middle", "large-tail", "small-tail"]),
    ],
)
def test_each_order_serves_by_its_measure(order: str, served: list[str]) -> None:
    requests = [
        request("small", SMALL, steps=50, arrival_s=0.0),
        request("middle", MIDDLE, steps=10, arrival_s=1.0),
        request("large-tail", LARGE, steps=20, steps_done=16, arrival_s=2.0),
        request("small-tail", SMALL, steps=60, steps_done=55, arrival_s=3.0),
    ]
    first: list[str] = []
    while requests:
        view = ClusterView(9.0, requests, (), workers(1, "EDC"))
        (assignment,) = DitServe(TIMES, ALONE, JOB_ORDERS[order]).decide(view).assignments
        first += assignment.request_ids
        requests = [each for each in requests if each.spec.request_id not in assignment.request_ids]
    assert first == served


def test_who_came_first_is_stopped_for_nobody_where_the_order_is_that_of_arrival() -> None:
    old, new = request("old", LARGE, arrival_s=0.0), request("new", SMALL, arrival_s=1.0)
    view = ClusterView(2.0, [new], [running(old, "n0-w0")], ONE_BUSY)
    assert POLICY.decide(view).preemptions
    assert not DitServe(TIMES, ALONE, JOB_ORDERS["fcfs"]).decide(view).preemptions


def test_a_request_joins_a_running_batch_at_its_next_step_boundary() -> None:
    view = ClusterView(0.0, [request("new", SMALL)], [running(request("old", SMALL), "n0-w0")], ONE_BUSY)
    (assignment,) = POLICY.decide(view).assignments
    assert assignment.takes_over
    assert (assignment.request_ids, assignment.diffuse) == (("old", "new"), ("n0-w0",))
    assert "new joins" in assignment.reason
    engine = StepEngine(DitServe(TIMES, BATCHES, SRPTF), workers(1, "EDC"))
    engine.play([request("old", SMALL, steps=20), request("new", SMALL, steps=5, arrival_s=0.03)])
    batches = [set(each.request_ids) for _, each in engine.log]
    assert batches == [{"old"}, {"old", "new"}, {"old"}]
    assert not engine.preempted
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


def test_nobody_later_takes_the_workers_that_a_ring_waits_for() -> None:
    """The long one has the fewest steps left, and needs four workers of which one is still in a step."""
    policy = DitServe(TIMES, ALONE, JOB_ORDERS["srtf"])
    active = [running(request("middle", MIDDLE, steps=40), "n0-w0")]
    views = [worker("n0-w0", "EDC", free_at_s=9.0), *workers(3, "EDC", first=1)]
    pending = [request("long", LARGE, steps=10), request("short", SMALL, steps=50)]
    decisions = policy.decide(ClusterView(0.0, pending, active, views))
    assert [each.request_id for each in decisions.preemptions] == ["middle"]
    assert not decisions.assignments


def test_a_ring_that_does_not_fit_runs_one_step_on_what_is_idle() -> None:
    short = running(request("short", SMALL, steps=2), "n0-w0")
    views = [worker("n0-w0", "EDC", free_at_s=9.0), *workers(3, "EDC", first=1)]
    (assignment,) = POLICY.decide(ClusterView(0.0, [request("long", LARGE)], [short], views)).assignments
    assert len(assignment.diffuse) == 2
    assert assignment.num_steps == 1
