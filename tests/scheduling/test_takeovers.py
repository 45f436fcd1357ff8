"""Requests that join a running batch: its plan is taken over at the next step boundary, wherever that is."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.scheduling.fakes import FakeTimes, workers_of
from tridentserve.plans import DispatchPlan, StageSpan
from tridentserve.protocols import Assignment, ClusterView, Decisions
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.stages import PlacementType, Stage
from tridentserve.testing import make_request

E, D, C = Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE


@dataclass
class Joining:
    """Starts the first request on the only worker, and lets all others join it."""

    views: list[ClusterView] = field(default_factory=list)

    def decide(self, view: ClusterView) -> Decisions:
        self.views.append(view)
        running = [each.spec.request_id for each in view.running]
        waiting = [each.spec.request_id for each in view.pending]
        if running and any(each.yielding for each in view.running):
            return Decisions()
        encode = () if all(each.encoded for each in view.pending) else ("w",)
        made = Assignment(
            (*running, *waiting),
            PlacementType.EDC,
            encode,
            ("w",),
            ("w",),
            view.now_s,
            "joins",
            takes_over=bool(running),
        )
        return Decisions([made])

    def can_ever_run(self, spec: RequestSpec, workers: object) -> None:
        return None


class Engine:
    """The scheduler, fed by hand."""

    def __init__(self) -> None:
        self.policy = Joining()
        self.scheduler = Scheduler(*workers_of({"w": PlacementType.EDC}), FakeTimes(), self.policy)
        (spec,) = workers_of({"w": PlacementType.EDC})[0]
        self.scheduler.on(ev.WorkerJoined(spec), 0.0)

    def arrive(self, name: str, steps: int, now_s: float) -> list[ev.Effect]:
        self.scheduler.on(ev.RequestArrived(make_request(name, steps)), now_s)
        return self.scheduler.on(ev.Tick(), now_s)

    def finish(self, plan: DispatchPlan, now_s: float, ran: tuple[Stage, ...], steps: int | None) -> list[ev.Effect]:
        spans = tuple(StageSpan(stage, now_s, now_s, plan.workers) for stage in ran)
        return self.scheduler.on(ev.StageFinished(plan.plan_id, spans, steps), now_s)

    def take_over(self) -> tuple[DispatchPlan, DispatchPlan]:
        """`old` runs with 10 steps, and `new` comes with 4 when 2 of these are done."""
        (first,) = plans_of(self.arrive("old", 10, 0.0))
        effects = self.arrive("new", 4, 2.6)
        assert [type(effect) for effect in effects] == [ev.Yield, ev.RunPlan]
        assert isinstance(effects[0], ev.Yield)
        assert effects[0].plan_id == first.plan_id
        (second,) = plans_of(effects)
        return first, second


def plans_of(effects: list[ev.Effect]) -> list[DispatchPlan]:
    return [effect.plan for effect in effects if isinstance(effect, ev.RunPlan)]


def test_the_plan_is_sent_behind_the_one_that_it_takes_over() -> None:
    first, second = Engine().take_over()
    assert second.takes_over == first.plan_id
    assert (second.stages, second.workers, second.request_ids) == ((E, D), ("w",), ("old", "new"))
    old, new = second.members
    assert (old.input_id, old.source, new.input_id) == (first.plan_id, "w", None)
    assert second.inherited == (old,)
    # C is expected to be part of the time of the first plan, so that fewer steps of it seem to be done.
    assert (old.steps, new.steps) == ((1, 5), (0, 4))


@pytest.mark.parametrize("stopped_after", [2, 3, 5, 7])
def test_whatever_the_boundary_was_all_steps_are_done(stopped_after: int) -> None:
    """The worker does as many steps as the one with the fewest left has."""
    engine = Engine()
    first, second = engine.take_over()
    assert engine.finish(first, 3.0, (E, D), stopped_after) == []
    together = min(10 - stopped_after, 4)
    effects = engine.finish(second, 9.0, (E, D), together)
    (decode,) = plans_of(effects)
    ended = "new" if together == 4 else "old"
    assert (decode.stages, decode.request_ids) == ((C,), (ended,))
    effects = engine.scheduler.on(ev.Tick(), 9.0)
    engine.finish(decode, 9.5, (C,), None)
    (last,) = plans_of(effects or engine.scheduler.on(ev.Tick(), 9.5))
    left = 10 - stopped_after - together if ended == "new" else 4 - together
    assert last.num_steps == left
    assert last.members[0].input_id == second.plan_id


def test_a_plan_that_reaches_its_end_before_leaves_its_requests_behind() -> None:
    """Its last step was under way: `old` is decoded with it, and `new` goes on alone."""
    engine = Engine()
    first, second = engine.take_over()
    effects = engine.finish(first, 3.0, (E, D, C), None)
    assert [type(effect) for effect in effects] == [ev.Finish]
    effects = engine.finish(second, 9.0, (E, D), 4)
    (decode,) = plans_of(effects)
    assert decode.request_ids == ("new",)


def test_a_plan_that_is_stopped_before_its_first_step_gives_nothing_over() -> None:
    engine = Engine()
    first, second = engine.take_over()
    engine.finish(first, 2.6, (), 0)
    assert "old" in engine.scheduler._ledger.pending
    assert engine.scheduler._ledger.requests["old"].steps_done == 0
    engine.finish(second, 9.0, (E, D), 4)
    assert engine.scheduler.num_pending == 1


def test_a_plan_that_fails_costs_those_it_had_a_retry_and_not_those_that_join() -> None:
    engine = Engine()
    first, second = engine.take_over()
    effects = engine.scheduler.on(ev.PlanFailed(first.plan_id, "fault"), 3.0)
    assert [effect.request_id for effect in effects if isinstance(effect, ev.Requeue)] == ["old"]
    (decode,) = plans_of(engine.finish(second, 9.0, (E, D), 4))
    assert decode.request_ids == ("new",)


def test_a_plan_that_takes_over_and_fails_costs_all_of_it_a_retry() -> None:
    engine = Engine()
    first, second = engine.take_over()
    engine.finish(first, 3.0, (E, D), 3)
    effects = engine.scheduler.on(ev.PlanFailed(second.plan_id, "fault"), 3.5)
    assert {effect.request_id for effect in effects if isinstance(effect, ev.Requeue)} == {"old", "new"}
    assert engine.scheduler.num_pending == 2


def test_a_plan_that_takes_over_may_fail_first() -> None:
    """As when the worker is lost: both are reported, in either order."""
    engine = Engine()
    first, second = engine.take_over()
    engine.scheduler.on(ev.PlanFailed(second.plan_id, "lost"), 3.0)
    engine.scheduler.on(ev.PlanFailed(first.plan_id, "lost"), 3.0)
    assert engine.scheduler.num_pending == 2
    assert not engine.scheduler._ledger.runs


@pytest.mark.parametrize("names", [("old",), ("new",), ("old", "new")])
def test_who_leaves_before_the_boundary_is_not_waited_for(names: tuple[str, ...]) -> None:
    engine = Engine()
    first, second = engine.take_over()
    effects = [effect for name in names for effect in engine.scheduler.on(ev.RequestCancelled(name), 2.7)]
    aborted = [effect.plan_id for effect in effects if isinstance(effect, ev.Abort)]
    assert aborted == ([second.plan_id] if len(names) == 2 else [])
    engine.finish(first, 3.0, (E, D), 3)
    if len(names) == 2:
        engine.scheduler.on(ev.PlanStopped(second.plan_id), 3.1)
        assert not engine.scheduler._ledger.requests
    else:
        steps = 4 if names == ("old",) else 7
        (decode,) = plans_of(engine.finish(second, 9.0, (E, D), steps))
        assert set(decode.request_ids) == {"old", "new"} - set(names)
    assert not [run for run in engine.scheduler._ledger.runs.values() if not run.requests]


def test_nobody_joins_what_is_being_taken_over_already() -> None:
    engine = Engine()
    first, second = engine.take_over()
    assert engine.arrive("third", 4, 2.7) == []
    view = engine.policy.views[-1]
    assert {each.spec.request_id: each.yielding for each in view.running} == {"old": True, "new": True}
    engine.finish(first, 3.0, (E, D), 3)
    effects = engine.scheduler.on(ev.Tick(), 3.1)
    (third,) = plans_of(effects)
    assert (third.takes_over, set(third.request_ids)) == (second.plan_id, {"old", "new", "third"})


def test_the_decode_of_one_that_has_ended_calls_nobody_back() -> None:
    """`x` ends with the plan that is taken over, and is decoded while `y` goes on with `z`."""
    engine = Engine()
    (first,) = plans_of(engine.arrive("x", 4, 0.0))
    (second,) = plans_of(engine.arrive("y", 10, 0.6))
    engine.finish(first, 1.0, (E, D), 1)
    (third,) = plans_of(engine.arrive("z", 10, 1.8))
    assert third.takes_over == second.plan_id
    (decode,) = plans_of(engine.finish(second, 4.0, (E, D), 3))
    assert decode.request_ids == ("x",)
    effects = engine.finish(decode, 6.0, (C,), None)
    assert [effect.request_id for effect in effects if isinstance(effect, ev.Finish)] == ["x"]
    requests = engine.scheduler._ledger.requests
    assert requests["y"].run is requests["z"].run is not None
    (last,) = plans_of(engine.finish(third, 14.0, (E, D), 7))
    assert last.request_ids == ("y",)


def test_a_plan_that_fails_before_it_takes_over_leaves_the_other_its_requests() -> None:
    engine = Engine()
    first, second = engine.take_over()
    effects = engine.scheduler.on(ev.PlanFailed(second.plan_id, "no memory"), 2.8)
    assert [effect.request_id for effect in effects if isinstance(effect, ev.Requeue)] == ["new"]
    engine.finish(first, 3.0, (E, D), 3)
    assert set(engine.scheduler._ledger.pending) == {"old", "new"}
    assert engine.scheduler._ledger.requests["old"].steps_done == 3


def test_a_plan_that_has_just_been_sent_is_not_taken_over() -> None:
    """Else two requests could push each other out of a batch, again and again, before it has begun."""
    engine = Engine()
    engine.arrive("old", 10, 0.0)
    assert engine.arrive("new", 4, 0.4) == []
    assert plans_of(engine.scheduler.on(ev.Tick(), 0.6))
