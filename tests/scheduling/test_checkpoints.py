"""State checkpoints, as the scheduler plans them, and where a request resumes when a worker is lost."""

from __future__ import annotations

import pytest

from tests.scheduling.fakes import FakeTimes, sole, workers_of
from tests.scheduling.test_runs import Bench, Script, plan_of
from tridentserve.cluster import WorkerSpec
from tridentserve.plans import CheckpointSteps, DispatchPlan, PlacementPlan, Replica, StageSpan
from tridentserve.protocols import Decisions
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry, decode_entry, encode_entry
from tridentserve.scheduling.request_records import RequestRecords
from tridentserve.scheduling.scheduler import Scheduler, SchedulerOptions
from tridentserve.stages import PlacementType, Stage
from tridentserve.testing import MODEL

E, D, C = Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE
EVERY_2_S = SchedulerOptions(checkpoint_s=2.0)  # a step takes one


def saved(plan: DispatchPlan, num_steps: int, now_s: float = 0.0) -> ev.CheckpointSaved:
    assert plan.saves is not None
    spans = tuple(
        StageSpan(stage, now_s - 1.0, now_s, plan.workers_of(stage), num_steps if stage is D else None)
        for stage in plan.stages
        if stage is not C
    )
    return ev.CheckpointSaved(plan.plan_id, num_steps, plan.saves.keeper, spans)


def started(steps: int = 8, options: SchedulerOptions = EVERY_2_S) -> tuple[Bench, DispatchPlan]:
    bench = Bench(options=options)
    bench.arrive("r", steps=steps)
    return bench, bench.start()


def test_a_plan_says_when_and_where_its_states_are_copied() -> None:
    bench, plan = started()
    assert plan.saves == CheckpointSteps(keeper="b", first=2, every=2)
    assert [step for step in range(1, 9) if plan.is_saved_after(step)] == [2, 4, 6]
    bench.arrive("s", steps=8)
    other = bench.start(ids="s", diffuse="b", encode="b", decode="b")
    assert other.saves is not None
    assert other.saves.keeper == "e", "all keep about as many"


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        (SchedulerOptions(), 8, (1, 1)),
        (SchedulerOptions(checkpoint_s=0.0), 8, None),
        (SchedulerOptions(checkpoint_s=0.0, checkpoint_steps=3), 8, None),
        (SchedulerOptions(checkpoint_s=0.4), 8, (1, 1)),
        (SchedulerOptions(checkpoint_s=1.0, checkpoint_steps=3), 8, (3, 3)),
        (SchedulerOptions(checkpoint_s=8.0), 8, None),
    ],
)
def test_how_often(options: SchedulerOptions, steps: int, expected: tuple[int, int] | None) -> None:
    saves = started(steps, options)[1].saves
    assert (saves and (saves.first, saves.every)) == expected


def test_the_copies_go_to_another_node_where_there_is_one() -> None:
    specs = [WorkerSpec(name, node, 100) for name, node in (("a", "n0"), ("b", "n0"), ("x", "n1"))]
    placement = PlacementPlan({spec.worker_id: frozenset(Replica(MODEL, stage) for stage in Stage) for spec in specs})
    bench = Bench(options=EVERY_2_S)
    bench.script = Script()
    bench.scheduler = Scheduler(specs, placement, FakeTimes(), bench.script, EVERY_2_S)
    for spec in specs:
        bench.on(ev.WorkerJoined(spec))
    for _ in range(2):
        bench.arrive("r", steps=8)
        plan = bench.start()
        assert plan.saves is not None
        assert plan.saves.keeper == "x"
        bench.on(ev.RequestCancelled("r"))
        bench.on(ev.PlanStopped(plan.plan_id))
    bench.on(ev.WorkerLost("x", "killed"))
    bench.arrive("r", steps=8)
    alone = bench.start(diffuse="a b", encode="a", decode="a")
    assert alone.saves is None, "there is nobody else"


def test_a_lost_plan_resumes_from_its_checkpoint_at_another_degree() -> None:
    bench, plan = started(steps=10)
    bench.on(saved(plan, 2))
    bench.on(saved(plan, 4))
    (effect,) = bench.on(ev.PlanFailed(plan.plan_id, "a was killed"), 5.0)
    assert effect == ev.Requeue("r", "a was killed", steps_done=4)
    bench.on(ev.WorkerLost("a", "killed"), 5.0)
    assert bench.pending() == {"r": (4, True, "b")}
    rest = bench.start(5.0, diffuse="b c", encode="", decode="c")
    assert (rest.stages, rest.workers, sole(rest).steps) == ((D,), ("b", "c"), (4, 10))
    assert (sole(rest).input_id, sole(rest).source, sole(rest).from_checkpoint) == (plan.plan_id, "b", True)
    assert rest.saves == CheckpointSteps("e", first=4, every=4), "a step takes half a second at degree 2"
    (effect,) = bench.finish(rest, 9.0)
    decode = plan_of(effect)
    assert (decode.stages, sole(decode).input_id, sole(decode).from_checkpoint) == ((C,), rest.plan_id, False)


def test_steps_of_earlier_segments_count_for_the_first_copy() -> None:
    bench, plan = started(options=SchedulerOptions(checkpoint_s=3.0))
    bench.decide(Decisions())
    bench.on(ev.StageFinished(plan.plan_id, (StageSpan(D, 0.0, 2.0),), 2), 2.0)
    rest = bench.start(2.0, encode="")
    assert rest.saves is not None
    assert (rest.saves.first, rest.saves.every) == (1, 3)


def test_what_was_kept_on_a_lost_worker_goes_back_to_its_copy() -> None:
    bench, plan = started()
    bench.on(saved(plan, 2))
    bench.on(ev.StageFinished(plan.plan_id, (StageSpan(E, 0.0, 1.0), StageSpan(D, 1.0, 4.0)), 3), 4.0)
    assert bench.pending() == {"r": (3, True, "a")}
    assert bench.on(ev.WorkerLost("a", "killed"), 5.0) == [ev.Requeue("r", "killed", steps_done=2)]
    assert bench.on(ev.WorkerLost("b", "killed"), 6.0) == [ev.Requeue("r", "killed")], "now the copy is gone, too"
    assert bench.pending() == {"r": (0, False, None)}


def test_a_copy_on_a_lost_worker_does_not_count() -> None:
    bench, plan = started()
    bench.on(saved(plan, 2))
    bench.on(ev.WorkerLost("b", "killed"))
    bench.on(saved(plan, 4))  # said before it was lost
    assert bench.on(ev.PlanFailed(plan.plan_id, "x")) == [ev.Requeue("r", "x")]


def test_a_copy_that_fails_twice_is_given_up_before_the_request_is() -> None:
    bench, plan = started(options=SchedulerOptions(checkpoint_s=2.0, max_retries=2))
    bench.on(saved(plan, 2))
    steps_done = []
    for _ in range(2):
        (effect,) = bench.on(ev.PlanFailed(plan.plan_id, "x"))
        assert isinstance(effect, ev.Requeue)
        steps_done.append(effect.steps_done)
        plan = bench.start(encode="" if effect.steps_done else "a")
    assert steps_done == [2, 0]
    (effect,) = bench.on(ev.PlanFailed(plan.plan_id, "x"))
    assert isinstance(effect, ev.Reject)


def test_the_members_of_a_batch_go_back_each_to_its_own_step() -> None:
    bench = Bench(options=EVERY_2_S)
    bench.arrive("old", "new", steps=9)
    first = bench.start(ids="old", decode="", num_steps=1)
    bench.finish(first, 1.0)
    encode = bench.start(1.0, ids="old new", encode="e")
    (effect,) = bench.finish(encode, 2.0)
    both = plan_of(effect)
    assert both.saves is not None
    assert both.saves.first == 1, "old has one step that is not saved"
    bench.on(saved(both, 1))
    bench.on(ev.PlanFailed(both.plan_id, "x"))
    assert {name: steps for name, (steps, *_) in bench.pending().items()} == {"old": 2, "new": 1}


def test_a_copy_of_a_plan_that_nobody_waits_for_is_ignored() -> None:
    bench, plan = started()
    bench.on(ev.RequestCancelled("r"))
    assert bench.on(saved(plan, 2)) == []
    bench.on(ev.PlanStopped(plan.plan_id))
    assert bench.on(saved(plan, 4)) == []


def test_users_see_the_stages_that_count() -> None:
    bench, plan = started()
    records = RequestRecords()
    run = ev.RunPlan(plan, "")
    arrived = bench.scheduler._ledger.requests["r"].spec
    records.apply(ev.RequestArrived(arrived), [], 0.0)
    records.apply(ev.Tick(), [run], 0.0)
    records.apply(saved(plan, 2, now_s=4.0), [], 4.0)
    records.apply(ev.PlanFailed(plan.plan_id, "x"), [ev.Requeue("r", "x", steps_done=2)], 5.0)
    record = records.records["r"]
    assert record.retries == 1
    assert [(ran.stage, ran.steps) for ran in record.timeline] == [(E, None), (D, 2)]
    records.apply(ev.WorkerLost("b", "x"), [ev.Requeue("r", "x")], 6.0)
    assert record.timeline == []


def test_the_log_holds_checkpoints_and_resumed_plans() -> None:
    _, plan = started()
    event = saved(plan, 2)
    for decision in (LogEntry(1.0, event, []), LogEntry(2.0, ev.Tick(), [ev.RunPlan(plan, "why")])):
        assert decode_entry(encode_entry(decision)) == decision
    assert not ev.may_change_plans(event)
    assert ev.may_change_plans(ev.Tick())
    specs, _ = workers_of({"a": PlacementType.EDC})
    assert ev.may_change_plans(ev.WorkerJoined(specs[0]))
