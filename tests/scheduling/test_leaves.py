"""Requests that end in a running batch: C of them and D of the others have been sent behind the plan of all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.scheduling.fakes import FakeTimes, workers_of
from tests.scheduling.test_takeovers import plans_of
from tridentserve.plans import DispatchPlan, StageSpan, WorkerId
from tridentserve.protocols import Assignment, ClusterView, Decisions, Preemption
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry
from tridentserve.scheduling.explanation.chronicle import Chronicle
from tridentserve.scheduling.request_records import RequestRecords
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.stages import PlacementType, Stage
from tridentserve.testing import make_request

E, D, C = Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE


@dataclass
class Batching:
    """All that wait run together on `w`, or join the batch there; whoever is named in `stops` is stopped."""

    decodes_at: WorkerId
    num_steps: int | None = None
    stops: str | None = None

    def decide(self, view: ClusterView) -> Decisions:
        if self.stops is not None:
            name, self.stops = self.stops, None
            return Decisions((), [Preemption(name, "others first")])
        running = [each for each in view.running if each.stage is D]
        if any(each.yielding for each in running) or (not running and not view.workers[0].idle):
            return Decisions()
        waiting = [each.spec.request_id for each in view.pending]
        encode = () if all(each.encoded for each in view.pending) else ("w",)
        names = (*(each.spec.request_id for each in running), *waiting)
        workers = encode, ("w",), (self.decodes_at,)
        made = Assignment(names, PlacementType.EDC, *workers, view.now_s, "together", self.num_steps)
        return Decisions([replace(made, takes_over=bool(running), goes_on=True)])

    def can_ever_run(self, spec: RequestSpec, workers: object) -> None:
        return None


class Engine:
    """The scheduler, fed by hand; what it decides is kept as a log."""

    def __init__(self, decodes_at: WorkerId = "w", num_steps: int | None = None) -> None:
        self.policy = Batching(decodes_at, num_steps)
        workers = workers_of({"w": PlacementType.EDC, "c": PlacementType.C})
        self.scheduler = Scheduler(*workers, FakeTimes(), self.policy)
        self.log: list[LogEntry] = []
        self.records = RequestRecords()
        for spec in workers[0]:
            self.on(ev.WorkerJoined(spec), 0.0)

    def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        effects = self.scheduler.on(event, now_s)
        self.log.append(LogEntry(now_s, event, effects))
        self.records.apply(event, effects, now_s)
        return effects

    def arrive(self, now_s: float, **steps: int) -> list[ev.Effect]:
        for name, count in steps.items():
            self.on(ev.RequestArrived(make_request(name, count)), now_s)
        return self.on(ev.Tick(), now_s)

    def finish(self, plan: DispatchPlan, now_s: float, ran: tuple[Stage, ...], steps: int | None) -> list[ev.Effect]:
        spans = tuple(StageSpan(s, now_s, now_s, plan.workers, steps if s is D else None) for s in ran)
        return self.on(ev.StageFinished(plan.plan_id, spans, steps), now_s)

    @property
    def run_of(self) -> dict[str, object]:
        return {name: request.run for name, request in self.scheduler._ledger.requests.items()}

    @property
    def waiting(self) -> dict[str, int]:
        """The requests that wait, with the steps that they have done."""
        return {name: each.steps_done for name, each in self.scheduler._ledger.pending.items()}

    def check_that_nothing_is_left(self) -> None:
        ledger = self.scheduler._ledger
        assert not ledger.requests
        assert not ledger.runs
        assert not ledger._plans
        assert all(view.idle and not view.promised_s for view in self.scheduler._pool.list_views())


def ends_of(effects: list[ev.Effect]) -> list[str]:
    return [effect.request_id for effect in effects if isinstance(effect, ev.Finish)]


def yields_of(effects: list[ev.Effect]) -> list[int]:
    return [effect.plan_id for effect in effects if isinstance(effect, ev.Yield)]


def test_what_follows_is_sent_with_the_plan_of_the_batch() -> None:
    both, decode, rest = plans_of(Engine().arrive(0.0, short=3, long=7))
    assert (both.stages, both.num_steps, both.takes_over) == ((E, D), 3, None)
    assert (decode.stages, decode.request_ids, decode.takes_over) == ((C,), ("short",), both.plan_id)
    assert (rest.stages, rest.request_ids, rest.takes_over) == ((D, C), ("long",), both.plan_id)
    (member,) = rest.members
    assert (member.steps, member.input_id, member.inherited) == ((3, 7), both.plan_id, True)


def test_a_batch_goes_on_by_itself_until_its_last_request_has_ended() -> None:
    """The second plan of three is followed by others as soon as it begins."""
    engine = Engine()
    first, decode, second = plans_of(engine.arrive(0.0, a=2, b=4, c=9))
    effects = engine.finish(first, 3.0, (E, D), 2)
    decode_b, third = plans_of(effects)
    assert (decode_b.request_ids, decode_b.takes_over) == (("b",), second.plan_id)
    assert (third.request_ids, third.takes_over, third.stages) == (("c",), second.plan_id, (D, C))
    assert engine.waiting == {}
    assert ends_of(engine.finish(decode, 4.0, (C,), None)) == ["a"]
    assert plans_of(engine.finish(second, 6.0, (D,), 2)) == []
    assert ends_of(engine.finish(decode_b, 7.0, (C,), None)) == ["b"]
    assert ends_of(engine.finish(third, 9.0, (D, C), 5)) == ["c"]
    engine.check_that_nothing_is_left()


def test_c_elsewhere_is_sent_when_it_is_due() -> None:
    engine = Engine(decodes_at="c")
    both, rest = plans_of(engine.arrive(0.0, short=3, long=7))
    assert rest.stages == (D,)
    (decode,) = plans_of(engine.finish(both, 3.0, (E, D), 3))
    assert (decode.workers, decode.request_ids) == (("c",), ("short",))
    assert plans_of(engine.finish(rest, 7.0, (D,), 4)) == []  # its worker is busy
    effects = engine.finish(decode, 8.0, (C,), None)
    assert ends_of(effects) == ["short"]
    (last,) = plans_of(effects)
    assert [span.stage for span in engine.records.records["short"].timeline] == [E, D, C]
    assert ends_of(engine.finish(last, 9.0, (C,), None)) == ["long"]
    engine.check_that_nothing_is_left()


@pytest.mark.parametrize("steps", [{"a": 5, "b": 5}, {"a": 5}])
def test_nothing_is_sent_ahead_of_those_that_end_together(steps: dict[str, int]) -> None:
    assert len(plans_of(Engine().arrive(0.0, **steps))) == 1


def test_nothing_is_sent_ahead_of_a_segment_after_which_nobody_ends() -> None:
    assert len(plans_of(Engine(num_steps=2).arrive(0.0, a=3, b=7))) == 1


def test_whoever_comes_may_join_although_the_rest_has_been_sent_ahead() -> None:
    """Nobody has ended at the boundary: the plan of the rest lets its member through, and has nothing to do."""
    engine = Engine()
    both, decode, rest = plans_of(engine.arrive(0.0, short=6, long=9))
    effects = engine.arrive(2.6, new=4)
    assert yields_of(effects) == [rest.plan_id, both.plan_id]
    (three,) = plans_of(effects)
    assert three.takes_over == rest.plan_id
    assert {each.request_id: each.input_id for each in three.members} == {
        "short": both.plan_id,
        "long": rest.plan_id,
        "new": None,
    }
    assert engine.finish(both, 3.0, (E, D), 3) == []
    assert engine.on(ev.PlanStopped(decode.plan_id), 3.0) == []
    assert engine.waiting == {}
    effects = engine.finish(rest, 3.0, (D,), 0)
    decode, rest = plans_of(effects)
    assert (decode.request_ids, set(rest.request_ids)) == (("short",), {"long", "new"})
    assert rest.num_steps == 1
    engine.finish(three, 6.0, (E, D), 3)
    assert ends_of(engine.finish(decode, 7.0, (C,), None)) == ["short"]


def test_one_that_has_ended_at_that_boundary_is_decoded_and_the_rest_is_joined() -> None:
    """The stop comes too late for the first plan: the second one has begun, and gives way after its first step."""
    engine = Engine()
    both, decode, rest = plans_of(engine.arrive(0.0, short=6, long=12))
    (three,) = plans_of(engine.arrive(2.6, new=4))
    engine.finish(both, 6.0, (E, D), 6)
    assert engine.run_of["short"] is not engine.run_of["long"]
    assert ends_of(engine.finish(decode, 7.0, (C,), None)) == ["short"]
    engine.finish(rest, 8.0, (D,), 1)
    assert engine.waiting == {}
    assert engine.scheduler._ledger.requests["long"].steps_done == 7
    engine.finish(three, 12.0, (E, D), 4)
    assert engine.scheduler._ledger.requests["long"].steps_done == 11


def test_all_of_the_line_is_stopped_and_waits() -> None:
    engine = Engine()
    both, decode, rest = plans_of(engine.arrive(0.0, short=6, long=9))
    engine.on(ev.RequestArrived(make_request("urgent", 1)), 2.0)
    engine.policy.stops = "long"
    assert yields_of(engine.on(ev.Tick(), 2.0)) == [rest.plan_id, both.plan_id]
    engine.finish(both, 3.0, (E, D), 3)
    engine.on(ev.PlanStopped(decode.plan_id), 3.0)
    engine.finish(rest, 3.0, (D,), 0)
    assert engine.waiting == {"urgent": 0, "short": 3, "long": 3}


def test_a_plan_that_was_sent_ahead_and_fails_first_leaves_the_batch_its_requests() -> None:
    engine = Engine()
    both, decode, rest = plans_of(engine.arrive(0.0, short=3, long=7))
    assert engine.on(ev.PlanFailed(decode.plan_id, "no memory"), 1.0) == []
    assert engine.on(ev.PlanFailed(rest.plan_id, "no memory"), 1.0) == []
    (again,) = plans_of(engine.finish(both, 3.0, (E, D), 3))
    assert (again.stages, again.request_ids, again.takes_over) == ((C,), ("short",), None)
    assert engine.waiting == {"long": 3}


def test_a_plan_that_fails_leaves_nothing_to_those_behind_it() -> None:
    engine = Engine()
    both, decode, rest = plans_of(engine.arrive(0.0, short=3, long=7))
    effects = engine.on(ev.PlanFailed(both.plan_id, "fault"), 2.0)
    assert {effect.request_id for effect in effects if isinstance(effect, ev.Requeue)} == {"short", "long"}
    assert [effect.plan_id for effect in effects if isinstance(effect, ev.Abort)] == [rest.plan_id]
    for plan in (decode, rest):
        assert engine.on(ev.PlanStopped(plan.plan_id), 2.1) == []
    assert engine.waiting == {"short": 0, "long": 0}
    assert not engine.scheduler._ledger.runs


@pytest.mark.parametrize("failing", ["rest", "three"])
def test_a_link_of_the_line_that_fails_costs_only_those_that_come_through_it(failing: str) -> None:
    """The members of a batch go on where they can; no step of theirs is lost."""
    engine = Engine()
    both, decode, rest = plans_of(engine.arrive(0.0, short=6, long=9))
    (three,) = plans_of(engine.arrive(2.6, new=4))
    plan = rest if failing == "rest" else three
    effects = engine.on(ev.PlanFailed(plan.plan_id, "no memory"), 2.7)
    requeued = [effect.request_id for effect in effects if isinstance(effect, ev.Requeue)]
    assert requeued == ([] if failing == "rest" else ["new"])
    engine.finish(both, 3.0, (E, D), 3)
    engine.on(ev.PlanStopped(decode.plan_id), 3.0)
    if failing == "rest":
        assert engine.waiting == {"long": 3}
        assert engine.run_of["short"] is engine.run_of["new"] is not None
    else:
        assert engine.waiting == {"new": 0, "short": 3}
        engine.finish(rest, 3.0, (D,), 0)
        assert engine.waiting == {"new": 0, "short": 3, "long": 3}


@pytest.mark.parametrize("names", [("short",), ("long",), ("short", "long")])
def test_whoever_is_cancelled_is_not_waited_for(names: tuple[str, ...]) -> None:
    engine = Engine()
    both, decode, rest = plans_of(engine.arrive(0.0, short=3, long=7))
    effects = [effect for name in names for effect in engine.on(ev.RequestCancelled(name), 1.0)]
    aborted = [effect.plan_id for effect in effects if isinstance(effect, ev.Abort)]
    assert aborted == ([both.plan_id] if len(names) == 2 else [])
    if len(names) == 2:
        engine.on(ev.PlanStopped(both.plan_id), 2.0)
    else:
        engine.finish(both, 3.0, (E, D), 3)
    if "short" in names:
        engine.on(ev.PlanStopped(decode.plan_id), 3.0)
    else:
        assert ends_of(engine.finish(decode, 4.0, (C,), None)) == ["short"]
    if "long" in names:
        engine.on(ev.PlanStopped(rest.plan_id), 4.0)
    else:
        assert ends_of(engine.finish(rest, 8.0, (D, C), 4)) == ["long"]
    engine.check_that_nothing_is_left()


def test_one_whose_c_finds_nothing_is_tried_again() -> None:
    """Else it would wait without end, as its plan has been reported."""
    engine = Engine()
    both, decode, _ = plans_of(engine.arrive(0.0, short=3, long=7))
    engine.finish(both, 3.0, (E, D), 3)
    effects = engine.on(ev.PlanStopped(decode.plan_id), 3.1)
    assert [effect.request_id for effect in effects if isinstance(effect, ev.Requeue)] == ["short"]


def test_the_log_tells_who_was_in_which_plan() -> None:
    engine = Engine()
    both, decode, rest = plans_of(engine.arrive(0.0, short=6, long=9))
    (three,) = plans_of(engine.arrive(2.6, new=4))
    engine.finish(both, 3.0, (E, D), 3)
    engine.on(ev.PlanStopped(decode.plan_id), 3.0)
    last_c, last_d = plans_of(engine.finish(rest, 3.0, (D,), 0))
    lives = Chronicle(engine.log).lives
    plans = {name: [each.plan for each in life.plans] for name, life in lives.items()}
    assert plans["short"] == [both, three, last_c]
    assert plans["long"] == [both, rest, three, last_d]


def test_a_worker_is_expected_to_be_busy_until_the_last_plan_of_the_line_ends() -> None:
    engine = Engine()
    engine.arrive(0.0, short=3, long=9)
    alone = Engine()
    alone.arrive(0.0, long=9)
    line, single = (each.scheduler.describe_cluster(0.0).workers[0].plans[-1].end_s for each in (engine, alone))
    assert line >= single
    assert [plan.stages for plan in engine.scheduler.describe_cluster(0.0).workers[0].plans] == ["ED", "C", "DC"]


def test_a_line_of_which_the_worker_is_lost_leaves_nothing_behind() -> None:
    """The last plan is reported before the one in the middle."""
    engine = Engine()
    both, decode, rest = plans_of(engine.arrive(0.0, short=6, long=9))
    (three,) = plans_of(engine.arrive(2.6, new=4))
    for plan in (both, three, rest, decode):
        engine.on(ev.PlanFailed(plan.plan_id, "lost"), 2.7)
    assert engine.waiting == {"short": 0, "long": 0, "new": 0}
    assert not engine.scheduler._ledger.runs
    assert not engine.scheduler._ledger._plans


def test_nobody_joins_those_that_go_on_before_they_have_begun() -> None:
    """C of the one that has ended is before them on the same worker."""
    engine = Engine()
    both, _, rest = plans_of(engine.arrive(0.0, short=3, long=12))
    engine.finish(both, 3.0, (E, D), 3)
    (watched, _) = engine.scheduler.describe_cluster(3.0).workers[0].plans
    assert plans_of(engine.arrive(watched.end_s, new=4)) == []
    (joined,) = plans_of(engine.on(ev.Tick(), watched.end_s + 0.6))
    assert joined.takes_over == rest.plan_id
