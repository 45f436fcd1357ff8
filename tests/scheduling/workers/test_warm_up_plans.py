"""Plans of warm-ups, of which the scheduler decides nothing: their workers get nothing else meanwhile."""

from __future__ import annotations

from tests.scheduling.test_runs import Bench, C, D, E
from tridentserve.plans import FIRST_WARM_UP_ID, DispatchPlan, PlanMember
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry, decode_entry, encode_entry
from tridentserve.scheduling.explanation.recording import RecentDecisions
from tridentserve.testing import make_request

PLAN = DispatchPlan(FIRST_WARM_UP_ID, "m", (E, D, C), ("a", "b"), (PlanMember("warm-up", (0, 2)),), "pair")


def test_the_workers_of_a_warm_up_are_not_idle_until_it_has_ended() -> None:
    bench = Bench()
    idle = bench.idle()
    assert {"a", "b"} <= idle

    assert bench.on(ev.WarmUpBegun(PLAN, 10.0), 1.0) == []

    assert bench.idle() == idle - {"a", "b"}
    assert bench.scheduler.describe_cluster(2.0).workers, "it is no plan of the scheduler's, and can be watched"
    assert bench.on(ev.WarmUpEnded(PLAN), 3.0) == []
    assert bench.idle() == idle
    assert bench.on(ev.WarmUpEnded(PLAN), 3.0) == []


def test_a_warm_up_behind_a_plan_leaves_the_worker_busy_until_both_have_ended() -> None:
    bench = Bench()
    bench.arrive("r")
    plan = bench.start()
    bench.on(ev.WarmUpBegun(PLAN, 10.0), 1.0)
    bench.finish(plan, 4.0)
    assert "a" not in bench.idle()
    bench.on(ev.WarmUpEnded(PLAN), 5.0)
    assert "a" in bench.idle()


def test_the_log_has_warm_ups_and_its_latest_part_those_that_have_not_ended() -> None:
    begun, ended = ev.WarmUpBegun(PLAN, 10.0), ev.WarmUpEnded(PLAN)
    for event in (begun, ended):
        assert decode_entry(encode_entry(LogEntry(1.0, event, []))).event == event
    for closing in ((), (ended,)):
        recent = RecentDecisions(1)
        for event in (begun, *closing):
            recent.add(0.0, event, [])
        for number in range(9):
            recent.add(1.0 + number, ev.RequestArrived(make_request(f"r{number}")), [])
            recent.add(1.5 + number, ev.Tick(), [ev.Reject(f"r{number}", "cancelled", "enough")])
        kept = [entry.event for entry in recent.copy().entries if isinstance(entry.event, ev.WarmUpBegun)]
        assert kept == ([] if closing else [begun])
