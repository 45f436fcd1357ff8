"""The scheduler as a pure unit: events in, effects out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.simulated.greedy import Alternating
from tests.scheduling.fakes import FakeTimes, FixedDispatcher, sole, workers_of
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica, StageSpan
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry, decode_entry, encode_entry, replay
from tridentserve.scheduling.request_records import RequestRecords, RequestState
from tridentserve.scheduling.scheduler import Scheduler, SchedulerOptions
from tridentserve.stages import PlacementType, Stage
from tridentserve.testing import MODEL, make_request

E, D, C = Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE
APART = {
    "e": PlacementType.E,
    "d0": PlacementType.D,
    "d1": PlacementType.D,
    "c": PlacementType.C,
    "c2": PlacementType.C,
}


class Run:
    """A scheduler with its records and log, and a hand to feed it."""

    def __init__(self, dispatcher: FixedDispatcher, types: dict[str, PlacementType], max_retries: int = 2) -> None:
        self.times = FakeTimes()
        self.make: Callable[[], Scheduler] = lambda: Scheduler(
            *workers_of(types), FakeTimes(), dispatcher, SchedulerOptions(max_retries=max_retries)
        )
        specs, placement = workers_of(types)
        self.scheduler = Scheduler(specs, placement, self.times, dispatcher, SchedulerOptions(max_retries=max_retries))
        self.records = RequestRecords()
        self.log: list[LogEntry] = []
        for spec in specs:
            self.on(ev.WorkerJoined(spec))

    def on(self, event: ev.Event, now_s: float = 0.0) -> list[ev.Effect]:
        effects = self.scheduler.on(event, now_s)
        self.records.apply(event, effects, now_s)
        self.log.append(LogEntry(now_s, event, effects))
        return effects

    def plan(self, event: ev.Event, now_s: float = 0.0) -> DispatchPlan:
        """The one plan that an event leads to."""
        (effect,) = self.on(event, now_s)
        assert isinstance(effect, ev.RunPlan)
        return effect.plan

    def finish(self, plan: DispatchPlan, start_s: float, end_s: float) -> list[ev.Effect]:
        width_s = (end_s - start_s) / len(plan.stages)
        spans = tuple(
            StageSpan(
                stage,
                start_s + i * width_s,
                start_s + (i + 1) * width_s,
                plan.workers_of(stage),
                plan.num_steps if stage is D else None,
            )
            for i, stage in enumerate(plan.stages)
        )
        return self.on(ev.StageFinished(plan.plan_id, spans), end_s)


@pytest.fixture
def apart() -> Run:
    return Run(FixedDispatcher("e", "d0 d1", "c"), APART)


def test_what_a_request_waited_before_it_came_counts() -> None:
    """In its latency and its queueing, and for its deadline."""
    run = Run(FixedDispatcher("w", "w", "w"), {"w": PlacementType.EDC})
    spec = replace(make_request("r"), slo_s=9.0, waited_s=4.0)
    run.on(ev.RequestArrived(spec), 10.0)
    (waiting,) = run.scheduler._ledger.pending.values()
    assert (waiting.arrival_s, waiting.deadline_s) == (6.0, 15.0)
    (end,) = run.finish(run.plan(ev.Tick(), 10.0), 11.0, 14.0)
    assert isinstance(end, ev.Finish)
    assert (end.latency_s, run.records.records["r"].queue_s) == (8.0, 5.0)
    assert replace(spec, waited_s=0.0) == spec


def test_three_stages_on_three_sets_of_workers(apart: Run) -> None:
    assert apart.on(ev.RequestArrived(make_request("r"))) == []
    encode = apart.plan(ev.Tick())
    assert (encode.stages, encode.workers, sole(encode).push_to, sole(encode).source) == ((E,), ("e",), "d0", None)
    assert (sole(encode).steps, encode.group) == (None, None)
    (effect,) = apart.finish(encode, 0.0, 1.0)
    assert isinstance(effect, ev.RunPlan)
    diffuse = effect.plan
    assert (diffuse.stages, diffuse.workers, sole(diffuse).steps) == ((D,), ("d0", "d1"), (0, 4))
    assert (sole(diffuse).input_id, sole(diffuse).source, sole(diffuse).push_to) == (encode.plan_id, "e", "c")
    assert diffuse.group
    (effect,) = apart.finish(diffuse, 1.0, 3.0)
    assert isinstance(effect, ev.RunPlan)
    decode = effect.plan
    assert (decode.stages, decode.workers, sole(decode).input_id) == ((C,), ("c",), diffuse.plan_id)
    assert (sole(decode).source, sole(decode).push_to) == ("d0", None)
    (done,) = apart.finish(decode, 3.0, 5.0)
    assert isinstance(done, ev.Finish)
    assert (done.latency_s, done.slo_s) == (5.0, 2.5 * (0.5 + 4 * 0.5 + 2.0))
    assert apart.times.observed == [(E, 1, 1.0), (D, 2, 0.5), (C, 1, 2.0)]
    record = apart.records.records["r"]
    assert (record.state, record.slo_met) == (RequestState.COMPLETED, True)
    assert [(run.stage, run.workers, run.steps) for run in record.timeline] == [
        (E, ("e",), None), (D, ("d0", "d1"), 4), (C, ("c",), None),
    ]  # fmt: skip
    assert record.stage_seconds() == {"encode": 1.0, "diffuse": 2.0, "decode": 2.0}


def test_consecutive_stages_on_the_same_workers_are_one_plan() -> None:
    run = Run(FixedDispatcher("w", "w", "w"), {"w": PlacementType.EDC})
    run.on(ev.RequestArrived(make_request("r")))
    plan = run.plan(ev.Tick())
    assert (plan.stages, sole(plan).push_to, plan.group) == ((E, D, C), None, None)
    assert isinstance(run.finish(plan, 0.0, 3.0)[0], ev.Finish)


def test_decode_on_the_leader_frees_the_other_workers() -> None:
    run = Run(FixedDispatcher("a b", "a b", "a"), {"a": PlacementType.EDC, "b": PlacementType.EDC})
    run.on(ev.RequestArrived(make_request("r")))
    wide = run.plan(ev.Tick())
    assert wide.stages == (E, D)
    (effect,) = run.finish(wide, 0.0, 2.0)
    assert isinstance(effect, ev.RunPlan)
    assert (effect.plan.workers, sole(effect.plan).source) == (("a",), "a")
    idle = {view.worker_id: view.idle for view in run.scheduler._pool.list_views()}
    assert idle == {"a": False, "b": True}


def test_primaries_stay_reserved_while_encode_runs(apart: Run) -> None:
    apart.on(ev.RequestArrived(make_request("first")))
    first = apart.plan(ev.Tick())
    apart.on(ev.RequestArrived(make_request("second")))
    assert apart.on(ev.Tick()) == []
    free_at_s = {view.worker_id: view.free_at_s for view in apart.scheduler._pool.list_views()}
    assert (free_at_s["e"], free_at_s["d0"]) == (0.5, 0.5 + 4 * 0.5)
    (effect,) = apart.finish(first, 0.0, 1.0)
    assert apart.on(ev.Tick(), 1.0) == []
    assert isinstance(effect, ev.RunPlan)
    apart.finish(effect.plan, 1.0, 2.0)
    assert sole(apart.plan(ev.Tick(), 2.0)).request_id == "second"


def test_work_that_is_due_later_counts_as_load(apart: Run) -> None:
    """Else the next request's decode would be sent to the same worker, since nothing waits there yet."""
    apart.on(ev.RequestArrived(make_request("r")))
    encode = apart.plan(ev.Tick())
    (promised,) = [view for view in apart.scheduler._pool.list_views() if view.worker_id == "c"]
    assert (promised.free_at_s, promised.promised_s) == (2.0, 2.0)
    (effect,) = apart.finish(encode, 0.0, 1.0)
    assert isinstance(effect, ev.RunPlan)
    apart.on(ev.RequestCancelled("r"), 1.5)
    assert {view.worker_id: view.free_at_s for view in apart.scheduler._pool.list_views()}["c"] == 0.0


def test_cancel_before_and_after_the_dispatch(apart: Run) -> None:
    apart.on(ev.RequestArrived(make_request("queued")))
    assert [type(effect) for effect in apart.on(ev.RequestCancelled("queued"))] == [ev.Reject]
    assert apart.on(ev.RequestCancelled("queued")) == []
    apart.on(ev.RequestArrived(make_request("running")))
    plan = apart.plan(ev.Tick())
    abort, reject = apart.on(ev.RequestCancelled("running"))
    assert isinstance(abort, ev.Abort)
    assert isinstance(reject, ev.Reject)
    assert (abort.plan_id, reject.code) == (plan.plan_id, "cancelled")
    apart.on(ev.RequestArrived(make_request("next")))
    assert apart.on(ev.PlanStopped(plan.plan_id)) == []
    assert sole(apart.plan(ev.Tick())).request_id == "next"
    assert apart.records.records["running"].state is RequestState.CANCELLED


def test_why_a_stage_finds_no_worker() -> None:
    """C's only worker is lost, or does not hold C any more."""
    types = {"e": PlacementType.E, "d": PlacementType.D, "c": PlacementType.C}
    run = Run(FixedDispatcher("e", "d", "c"), types)
    (c_spec,) = (spec for spec in workers_of(types)[0] if spec.worker_id == "c")

    def diffuse(start_s: float) -> DispatchPlan:
        (effect,) = run.finish(run.plan(ev.Tick(), start_s), start_s, start_s + 1.0)
        assert isinstance(effect, ev.RunPlan)
        return effect.plan

    run.on(ev.RequestArrived(make_request("r")))
    plan = diffuse(0.0)
    run.on(ev.WorkerLost("c", "killed"), 1.5)
    assert run.finish(plan, 1.0, 2.0) == [ev.Requeue("r", "c was lost before the plan started", 0)]
    run.on(ev.WorkerJoined(c_spec, 1), 2.0)
    plan = diffuse(2.0)
    held = {**workers_of(types)[1].replicas, "c": frozenset({Replica("other", C)})}
    run.on(ev.ModelAdded("other", "other", 2.5, PlacementPlan(held, "C is nowhere")), 3.0)
    run.on(ev.ReplicaLoaded("c", Replica("other", C), (Replica(MODEL, C),), "host", 1, 1.0), 3.0)
    assert run.finish(plan, 3.0, 4.0) == [ev.Requeue("r", f"no worker holds C of {MODEL} any more", 0)]


def test_a_plan_that_ends_after_its_request_was_cancelled_frees_its_workers(apart: Run) -> None:
    apart.on(ev.RequestArrived(make_request("r")))
    plan = apart.plan(ev.Tick())
    apart.on(ev.RequestCancelled("r"))
    assert apart.finish(plan, 0.0, 1.0) == []
    assert all(view.idle for view in apart.scheduler._pool.list_views())


def test_a_failed_plan_is_tried_again_on_a_new_group_until_it_fails_too_often(apart: Run) -> None:
    apart.on(ev.RequestArrived(make_request("r")))
    groups = []
    for attempt in range(3):
        (effect,) = apart.finish(apart.plan(ev.Tick()), 0.0, 1.0)
        assert isinstance(effect, ev.RunPlan)
        groups.append(effect.plan.group)
        (answer,) = apart.on(ev.PlanFailed(effect.plan.plan_id, "connection closed by peer"))
        assert isinstance(answer, ev.Requeue if attempt < 2 else ev.Reject)
    assert isinstance(answer, ev.Reject)
    assert (answer.code, len(set(groups))) == ("worker_failed", 3)
    assert "connection closed by peer" in answer.reason
    assert all(view.idle for view in apart.scheduler._pool.list_views())


def test_what_cannot_be_helped_is_not_tried_again(apart: Run) -> None:
    apart.on(ev.RequestArrived(make_request("r")))
    plan = apart.plan(ev.Tick())
    (answer,) = apart.on(ev.PlanFailed(plan.plan_id, "the prompt is odd", retry=False))
    assert isinstance(answer, ev.Reject)


def test_a_lost_decoder_is_replaced_by_another(apart: Run) -> None:
    apart.on(ev.RequestArrived(make_request("r")))
    (effect,) = apart.finish(apart.plan(ev.Tick()), 0.0, 1.0)
    assert isinstance(effect, ev.RunPlan)
    apart.on(ev.WorkerLost("c", "killed"), 1.5)
    (effect,) = apart.finish(effect.plan, 1.0, 2.0)
    assert isinstance(effect, ev.RunPlan)
    assert effect.plan.workers == ("c2",)


def test_a_lost_primary_puts_the_request_back(apart: Run) -> None:
    apart.on(ev.RequestArrived(make_request("r")))
    encode = apart.plan(ev.Tick())
    apart.on(ev.WorkerLost("d1", "killed"), 0.5)
    (effect,) = apart.finish(encode, 0.0, 1.0)
    assert isinstance(effect, ev.Requeue)
    assert apart.records.records["r"].state is RequestState.QUEUED
    assert apart.on(ev.Tick(), 1.0) == []  # the dispatcher is not offered workers that are lost
    specs, _ = workers_of(APART)
    apart.on(ev.WorkerJoined(specs[2], incarnation=1), 2.0)
    assert sole(apart.plan(ev.Tick(), 2.0)).request_id == "r"


def test_a_request_that_fits_nowhere_is_rejected_on_arrival(apart: Run) -> None:
    apart.scheduler._dispatcher.why_not = "too large"  # type: ignore[attr-defined]
    (answer,) = apart.on(ev.RequestArrived(make_request("r")))
    assert isinstance(answer, ev.Reject)
    assert (answer.code, answer.reason) == ("invalid_request", "too large")


def test_whether_a_kind_of_request_can_run_is_asked_once_for_each_placement() -> None:
    """The question looks at every worker, so that its cost would grow with the cluster."""
    specs, placement = workers_of(APART)
    dispatcher = FixedDispatcher("e", "d0 d1", "c")
    asked: list[str] = []
    dispatcher.can_ever_run = lambda spec, workers: asked.append(spec.request_id)  # type: ignore[method-assign]
    replanner = Alternating([placement, placement], period_s=10.0)
    scheduler = Scheduler(specs, placement, FakeTimes(), dispatcher, replanner=replanner)
    for number in range(8):
        scheduler.on(ev.RequestArrived(make_request(str(number))), 2.0 * number)
        scheduler.on(ev.Tick(), 2.0 * number)
    assert asked == ["0", "6"], "the placement has changed at 10 s"


def test_its_own_slo_counts(apart: Run) -> None:
    apart.on(ev.RequestArrived(make_request("r", slo_s=0.5)))
    plan = apart.plan(ev.Tick())
    for start_s in (0.0, 1.0):
        (effect,) = apart.finish(plan, start_s, start_s + 1.0)
        assert isinstance(effect, ev.RunPlan)
        plan = effect.plan
    (done,) = apart.finish(plan, 2.0, 3.0)
    assert isinstance(done, ev.Finish)
    assert done.slo_s == 0.5
    assert not apart.records.records["r"].slo_met


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["arrive", "tick", "end", "fail", "cancel", "lose", "join"]), st.integers(0, 9))
)


@given(ACTIONS)
def test_whatever_happens_nothing_is_lost_and_a_replay_decides_the_same(actions: list[tuple[str, int]]) -> None:
    run = Run(FixedDispatcher("e", "d0 d1", "c"), APART, max_retries=1)
    specs, _ = workers_of(APART)
    plans: dict[int, DispatchPlan] = {}

    def on(event: ev.Event, now_s: float) -> None:
        for effect in run.on(event, now_s):
            if isinstance(effect, ev.RunPlan):
                plans[effect.plan.plan_id] = effect.plan

    def report(number: int, now_s: float, failed: bool) -> None:
        plan = plans.pop(sorted(plans)[number % len(plans)])
        spans = tuple(StageSpan(stage, now_s, now_s) for stage in plan.stages)
        on(ev.PlanFailed(plan.plan_id, "x") if failed else ev.StageFinished(plan.plan_id, spans), now_s)

    for moment, (action, number) in enumerate(actions):
        now_s = float(moment)
        if action == "arrive":
            on(ev.RequestArrived(make_request(f"r{moment}")), now_s)
        elif action == "tick":
            on(ev.Tick(), now_s)
        elif action in ("end", "fail") and plans:
            report(number, now_s, action == "fail")
        elif action == "cancel":
            on(ev.RequestCancelled(f"r{number}"), now_s)
        elif action == "lose":
            on(ev.WorkerLost(specs[number % 5].worker_id, "killed"), now_s)
        elif action == "join":
            on(ev.WorkerJoined(specs[number % 5], moment), now_s)
        for view in run.scheduler._pool.list_views():  # never two plans at once on a primary
            if view.worker_id.startswith("d"):
                assert sum(view.worker_id in plan.workers for plan in plans.values()) <= 1
    now_s = float(len(actions))
    for spec in specs:
        on(ev.WorkerJoined(spec, 100), now_s)
    for _ in range(12 * len(actions)):
        on(ev.Tick(), now_s)
        while plans:
            report(0, now_s, failed=False)
    assert all(record.state.is_final for record in run.records.records.values())
    assert all(view.idle for view in run.scheduler._pool.list_views())
    logged = [decode_entry(encode_entry(decision)) for decision in run.log]
    assert logged == run.log
    assert all(decision.effects == effects for decision, effects in replay(logged, run.make()))
