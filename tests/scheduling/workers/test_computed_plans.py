"""Plans whose stages are done, and whose outputs are not files yet: their workers are free."""

from __future__ import annotations

from tests.scheduling.test_runs import TYPES, Bench, C, D, E
from tridentserve.protocols import Decisions, Preemption
from tridentserve.scheduling import events as ev


def test_the_workers_of_a_plan_are_free_while_its_outputs_become_files() -> None:
    bench = Bench()
    bench.arrive("r", "next")
    first = bench.start()
    assert first.stages == (E, D, C)
    assert "a" not in bench.idle()

    assert bench.on(ev.PlanComputed(first.plan_id), 4.0) == []

    assert "a" in bench.idle()
    second = bench.start(4.0, ids="next")
    assert second.workers == ("a",)
    assert bench.decide(Decisions(preemptions=[Preemption("r", "too late for that")]), 4.1) == []
    assert [type(effect) for effect in bench.finish(first, 4.2)] == [ev.Finish]
    assert "a" not in bench.idle()  # it has the second plan
    assert [type(effect) for effect in bench.finish(second, 8.0)] == [ev.Finish]
    assert "a" in bench.idle()


def test_a_plan_that_fails_after_its_stages_is_run_again() -> None:
    bench = Bench()
    bench.arrive("r", "next")
    first = bench.start()
    bench.on(ev.PlanComputed(first.plan_id), 4.0)
    second = bench.start(4.0, ids="next")

    assert [type(effect) for effect in bench.on(ev.PlanFailed(first.plan_id, "no room for the file"), 4.2)] == [
        ev.Requeue
    ]

    assert set(bench.pending()) == {"r"}
    assert "a" not in bench.idle()
    assert bench.on(ev.PlanComputed(first.plan_id), 4.3) == []  # it is not known any more
    bench.finish(second, 8.0)
    assert "a" in bench.idle()


def test_a_run_with_plans_to_come_keeps_its_workers() -> None:
    bench = Bench()
    bench.arrive("r")
    first = bench.start(diffuse="a b", encode="e", decode="a")
    assert first.stages == (E,)
    bench.on(ev.PlanComputed(first.plan_id), 1.0)
    assert bench.idle() == set(TYPES) - {"a", "b"}
