"""A policy that fails, or plans what was not profiled, loses nothing of what was decided before."""

from __future__ import annotations

import pytest

from tests.scheduling.fakes import FakeTimes, workers_of
from tests.scheduling.test_runs import TYPES, Bench, Replan, assignment, plan_of
from tridentserve.errors import ProfileError
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import ClusterView, Decisions
from tridentserve.requests import Shape
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.scheduler import PolicyError, Scheduler
from tridentserve.stages import Stage
from tridentserve.testing import make_request


class Gaps(FakeTimes):
    """Lacks C on two workers."""

    def seconds(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> float:
        if stage is Stage.DECODE and degree == 2:
            raise ProfileError("C at degree 2 was not profiled")
        return super().seconds(model, stage, shape, degree, batch)


def test_what_was_not_profiled_is_refused_and_the_others_of_the_tick_run() -> None:
    bench = Bench()
    specs, placement = workers_of(TYPES)
    bench.scheduler = Scheduler(specs, placement, Gaps(), bench.script)
    for spec in specs:
        bench.on(ev.WorkerJoined(spec))
    bench.arrive("good", "odd", "later")
    odd = assignment("odd", diffuse="b", encode="b", decode="a b")
    run, refused = bench.decide(Decisions([assignment("good"), odd]))
    assert plan_of(run).request_ids == ("good",)
    assert refused == ev.Reject("odd", "invalid_request", "C at degree 2 was not profiled")
    assert bench.pending().keys() == {"later"}
    assert bench.idle() == {"b", "c", "e"}


def test_a_dispatcher_that_fails_does_not_lose_the_placement_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    replan = Replan()
    bench = Bench(replan)
    bench.arrive("r")
    replan.plan = plan = PlacementPlan(workers_of(TYPES)[1].replicas, reason="anew")

    def fail(view: ClusterView) -> Decisions:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(bench.script, "decide", fail)
        with pytest.raises(PolicyError, match="ZeroDivisionError") as caught:
            bench.on(ev.Tick())
    assert caught.value.effects == [ev.Place(plan, "anew")]
    assert bench.start(ids="r").request_ids == ("r",)


def test_a_replanner_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    replan = Replan()
    bench = Bench(replan)

    def fail(*_: object) -> None:
        raise KeyError("load")

    monkeypatch.setattr(replan, "propose", fail)
    with pytest.raises(PolicyError, match="the replanner failed: KeyError"):
        bench.on(ev.Tick())


def test_a_dispatcher_that_cannot_judge_a_request_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def fail(*_: object) -> str | None:
        raise KeyError("shape")

    with monkeypatch.context() as patch:
        patch.setattr(bench.script, "can_ever_run", fail)
        (refused,) = bench.on(ev.RequestArrived(make_request("odd", 4)))
    assert refused == ev.Reject("odd", "internal_error", "the dispatch policy failed: KeyError('shape')")
    bench.arrive("good")  # the policy is asked again
    assert bench.start(ids="good").request_ids == ("good",)


@pytest.mark.parametrize(
    ("ids", "fault"),
    [("r r", "r more than once"), ("r gone s lost", "gone, lost do not wait"), ("gone", "gone does not wait")],
)
def test_what_is_wrong_with_an_assignment_is_named(ids: str, fault: str) -> None:
    bench = Bench()
    bench.arrive("r", "s")
    with pytest.raises(PolicyError, match=f"the dispatcher assigned {', '.join(ids.split())}: {fault}$"):
        bench.decide(Decisions([assignment(ids)]))
    assert bench.pending().keys() == {"r", "s"}


def test_a_request_that_is_assigned_twice_runs_once() -> None:
    bench = Bench()
    bench.arrive("r", "s")
    with pytest.raises(PolicyError, match="assigned s, r: r does not wait") as caught:
        bench.decide(Decisions([assignment("r"), assignment("s r", diffuse="b")]))
    assert [plan_of(effect).request_ids for effect in caught.value.effects] == [("r",)]
    assert bench.pending().keys() == {"s"}
    assert bench.start(ids="s", diffuse="b", encode="b", decode="b").request_ids == ("s",)
