"""Batches, segments of D, preemption, refusals and new placements, as the scheduler carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.fakes import FakeTimes, sole, workers_of
from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica, StageSpan
from tridentserve.protocols import Assignment, ClusterView, Decisions, Preemption, Refusal, StageReport, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry, decode_entry, encode_entry
from tridentserve.scheduling.runs.auxiliary_queues import DecodeOrder
from tridentserve.scheduling.runs.legs import merge_legs
from tridentserve.scheduling.scheduler import Scheduler, SchedulerOptions
from tridentserve.stages import PlacementType, Stage
from tridentserve.testing import MODEL, make_request

E, D, C = Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE
TYPES = {
    "a": PlacementType.EDC,
    "b": PlacementType.EDC,
    "e": PlacementType.E,
    "c": PlacementType.C,
}


class Script:
    """A dispatcher that says what the test has put down, once; remembers what it was shown."""

    def __init__(self) -> None:
        self.next = Decisions()
        self.seen: ClusterView | None = None

    def decide(self, view: ClusterView) -> Decisions:
        self.seen, decisions = view, self.next
        self.next = Decisions()
        return decisions

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return None


class Replan:
    """A replanner that proposes one plan, once."""

    def __init__(self, plan: PlacementPlan | None = None) -> None:
        self.plan = plan
        self.arrivals: list[str] = []
        self.reports: list[StageReport] = []

    def arrived(self, spec: RequestSpec, now_s: float) -> None:
        self.arrivals.append(spec.request_id)

    def stage_finished(self, report: StageReport) -> None:
        self.reports.append(report)

    def expect(self, model: str, load: Sequence[LoadShare], window_s: float | None) -> None:
        pass

    def forget(self, model: str) -> None:
        pass

    def propose(self, workers: Sequence[WorkerSpec], placement: PlacementPlan, now_s: float) -> PlacementPlan | None:
        plan, self.plan = self.plan, None
        return plan


class Bench:
    """A scheduler and a hand to feed it."""

    def __init__(
        self,
        replan: Replan | None = None,
        types: dict[str, PlacementType] = TYPES,
        options: SchedulerOptions | None = None,
    ) -> None:
        specs, placement = workers_of(types)
        self.script, self.replan = Script(), replan
        self.scheduler = Scheduler(specs, placement, FakeTimes(), self.script, options, replan)
        for spec in specs:
            self.on(ev.WorkerJoined(spec))

    def on(self, event: ev.Event, now_s: float = 0.0) -> list[ev.Effect]:
        return self.scheduler.on(event, now_s)

    def arrive(self, *names: str, steps: int = 4) -> None:
        for name in names:
            self.on(ev.RequestArrived(make_request(name, steps)))

    def decide(self, decisions: Decisions, now_s: float = 0.0) -> list[ev.Effect]:
        self.script.next = decisions
        return self.on(ev.Tick(), now_s)

    def start(self, now_s: float = 0.0, **where: object) -> DispatchPlan:
        (effect,) = self.decide(Decisions([assignment(**where)]), now_s)  # type: ignore[arg-type]
        return plan_of(effect)

    def finish(self, plan: DispatchPlan, now_s: float, steps: int | None = None, ran: Sequence[Stage] = ()) -> list:  # type: ignore[type-arg]
        spans = tuple(StageSpan(stage, now_s - 1.0, now_s) for stage in ran or plan.stages)
        return self.on(ev.StageFinished(plan.plan_id, spans, steps), now_s)

    def pending(self) -> dict[str, tuple[int, bool, str | None]]:
        """The waiting requests: steps done, whether encoded, where its state is."""
        views = self.scheduler._ledger.pending.values()
        return {view.spec.request_id: (view.steps_done, view.encoded, view.held_by) for view in views}

    def idle(self) -> set[str]:
        return {view.worker_id for view in self.scheduler._pool.list_views() if view.idle}


def assignment(
    ids: str = "r", diffuse: str = "a", encode: str = "a", decode: str = "a", num_steps: int | None = None
) -> Assignment:
    return Assignment(
        request_ids=tuple(ids.split()),
        primary=PlacementType.EDC,
        encode=tuple(encode.split()),
        diffuse=tuple(diffuse.split()),
        decode=tuple(decode.split()),
        expected_finish_s=9.0,
        reason="as written",
        num_steps=num_steps,
    )


def plan_of(effect: ev.Effect) -> DispatchPlan:
    assert isinstance(effect, ev.RunPlan)
    return effect.plan


def test_a_batch_is_one_plan_and_all_its_members_finish() -> None:
    bench = Bench()
    bench.arrive("x", "y", "z")
    plan = bench.start(ids="x y z")
    assert (plan.request_ids, plan.stages, plan.num_steps) == (("x", "y", "z"), (E, D, C), 4)
    done = bench.finish(plan, 5.0)
    assert [effect.request_id for effect in done if isinstance(effect, ev.Finish)] == ["x", "y", "z"]
    assert bench.idle() == set(TYPES)


def test_a_batch_that_fails_is_taken_apart_so_that_one_bad_input_ends_one_request() -> None:
    bench = Bench(options=SchedulerOptions(max_retries=0))
    bench.arrive("good", "bad")
    both = bench.start(ids="good bad")
    failed = bench.on(ev.PlanFailed(both.plan_id, "the image is odd", retry=False, code="bad_request"))
    assert failed == [ev.Requeue(name, "the image is odd") for name in ("good", "bad")]
    assert all(view.spec.alone for view in bench.scheduler._ledger.pending.values())
    bad = bench.start(ids="bad")
    assert bench.on(ev.PlanFailed(bad.plan_id, "the image is odd", retry=False, code="bad_request")) == [
        ev.Reject("bad", "bad_request", "the image is odd")
    ]
    assert isinstance(bench.finish(bench.start(ids="good"), 5.0)[0], ev.Finish)
    assert bench.idle() == set(TYPES)


def test_a_policy_that_does_not_take_a_batch_apart_comes_to_an_end() -> None:
    bench = Bench(options=SchedulerOptions(max_retries=1))
    bench.arrive("x", "y")
    kinds = []
    while bench.pending():
        plan = bench.start(ids="x y")
        kinds.append({type(effect) for effect in bench.on(ev.PlanFailed(plan.plan_id, "no", retry=False))})
    assert kinds == [{ev.Requeue}, {ev.Requeue}, {ev.Reject}]


def test_a_request_that_has_done_all_steps_leaves_a_batch_and_the_others_wait() -> None:
    bench = Bench()
    bench.arrive("short", steps=2)
    bench.arrive("long", steps=5)
    plan = bench.start(ids="short long", decode="c")
    assert (plan.stages, plan.num_steps, plan.members[0].push_to) == ((E, D), 2, "c")
    (effect,) = bench.finish(plan, 3.0)
    decode = plan_of(effect)
    assert (decode.stages, decode.workers, decode.request_ids) == ((C,), ("c",), ("short",))
    assert bench.pending() == {"long": (2, True, "a")}
    again = bench.start(3.0, ids="long", diffuse="a b", encode="", decode="a")
    assert (again.stages, again.workers, sole(again).steps) == ((D,), ("a", "b"), (2, 5))
    assert (sole(again).input_id, sole(again).source) == (plan.plan_id, "a")


def test_c_of_some_members_is_a_plan_of_its_own_even_on_the_same_worker() -> None:
    bench = Bench()
    bench.arrive("short", steps=2)
    bench.arrive("long", steps=5)
    plan = bench.start(ids="short long")
    assert plan.stages == (E, D)
    (effect,) = bench.finish(plan, 3.0)
    assert plan_of(effect).request_ids == ("short",)


@pytest.mark.parametrize(
    ("apart", "expected"),
    [((), [(E, D, C)]), ((C,), [(E, D), (C,)]), ((E,), [(E,), (D, C)]), ((E, C), [(E,), (D,), (C,)])],
)
def test_stages_that_are_kept_apart_are_plans_of_their_own_on_the_same_worker(
    apart: tuple[Stage, ...], expected: list[tuple[Stage, ...]]
) -> None:
    where = replace(assignment(), apart=frozenset(apart))
    legs = merge_legs(where, needs_encode=True, finishing=1)
    assert [leg.stages for leg in legs] == expected
    assert {leg.workers for leg in legs} == {("a",)}
    without_e = [tuple(stage for stage in stages if stage is not E) for stages in expected]
    assert [leg.stages for leg in merge_legs(where, needs_encode=False, finishing=1)] == [s for s in without_e if s]


def test_c_that_is_kept_apart_follows_on_the_worker_that_has_the_latents() -> None:
    bench = Bench()
    bench.arrive("r", "waits")
    (effect,) = bench.decide(Decisions([replace(assignment(), apart=frozenset((C,)))]))
    first = plan_of(effect)
    assert (first.stages, sole(first).push_to) == ((E, D), "a")
    (effect,) = bench.finish(first, 3.0)
    decode = plan_of(effect)
    assert (decode.stages, decode.workers, sole(decode).source) == ((C,), ("a",), "a")
    assert isinstance(bench.finish(decode, 5.0)[0], ev.Finish)
    assert bench.idle() == set(TYPES)


def test_only_members_without_a_condition_are_encoded() -> None:
    bench = Bench()
    bench.arrive("old", "new")
    first = bench.start(ids="old", decode="", num_steps=1)
    assert (first.stages, sole(first).steps) == ((E, D), (0, 1))
    assert bench.finish(first, 1.0) == []
    encode = bench.start(1.0, ids="old new", encode="e")
    assert (encode.stages, encode.request_ids) == ((E,), ("new",))
    (effect,) = bench.finish(encode, 2.0)
    diffuse = plan_of(effect)
    steps = [(member.steps, member.input_id, member.source) for member in diffuse.members]
    assert steps == [((1, 4), first.plan_id, "a"), ((0, 3), encode.plan_id, "e")]


def test_a_preempted_request_waits_with_what_it_has_done() -> None:
    bench = Bench()
    bench.arrive("r", "urgent")
    plan = bench.start()
    (effect,) = bench.decide(Decisions(preemptions=[Preemption("r", "urgent is in a hurry")]), 1.0)
    assert effect == ev.Yield(plan.plan_id, "urgent is in a hurry")
    assert bench.script.seen is not None
    bench.on(ev.Tick(), 1.1)
    assert [(view.spec.request_id, view.yielding) for view in bench.script.seen.running] == [("r", True)]
    assert bench.finish(plan, 2.0, steps=3, ran=(E, D)) == []
    assert bench.pending()["r"] == (3, True, "a")
    assert "a" in bench.idle()


def test_a_plan_that_yields_before_it_began_has_done_nothing() -> None:
    bench = Bench()
    bench.arrive("r")
    plan = bench.start()
    bench.arrive("other")
    bench.decide(Decisions(preemptions=[Preemption("r", "")]))
    bench.on(ev.StageFinished(plan.plan_id, (), 0), 1.0)
    assert bench.pending() == {"other": (0, False, None), "r": (0, False, None)}


def test_a_yield_that_comes_after_the_last_step_only_moves_c() -> None:
    bench = Bench()
    bench.arrive("r", "s")
    plan = bench.start()
    bench.decide(Decisions(preemptions=[Preemption("r", "")]))
    (effect,) = bench.finish(plan, 5.0, steps=4, ran=(E, D))
    decode = plan_of(effect)
    assert (decode.stages, decode.workers, sole(decode).input_id) == ((C,), ("a",), plan.plan_id)
    assert isinstance(bench.finish(decode, 6.0)[0], ev.Finish)


def test_preemption_during_an_encode_elsewhere_keeps_the_condition() -> None:
    bench = Bench()
    bench.arrive("r", "s")
    encode = bench.start(encode="e", decode="c")
    assert bench.decide(Decisions(preemptions=[Preemption("r", "")])) == [ev.Yield(encode.plan_id, "")]
    assert bench.finish(encode, 1.0) == []
    assert bench.pending()["r"] == (0, True, "e")
    assert bench.idle() == set(TYPES)


def test_a_member_that_cancels_leaves_the_batch_to_the_others() -> None:
    bench = Bench()
    bench.arrive("x", "y")
    plan = bench.start(ids="x y")
    assert [type(effect) for effect in bench.on(ev.RequestCancelled("x"), 1.0)] == [ev.Reject]
    assert [effect.request_id for effect in bench.finish(plan, 5.0)] == ["y"]
    bench.arrive("p", "q")
    plan = bench.start(ids="p q")
    bench.on(ev.RequestCancelled("p"), 6.0)
    assert [type(effect) for effect in bench.on(ev.RequestCancelled("q"), 6.0)] == [ev.Abort, ev.Reject]
    assert bench.on(ev.PlanStopped(plan.plan_id), 7.0) == []
    assert bench.idle() == set(TYPES)


def test_a_request_that_is_cancelled_while_its_e_waits_for_another_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.arrive("first", "second")
    plan = bench.start(ids="first", diffuse="a", encode="e", decode="a")
    assert bench.decide(Decisions([assignment("second", diffuse="b", encode="e", decode="b")])) == []
    (gone,) = bench.on(ev.RequestCancelled("second"))
    assert gone == ev.Reject("second", "cancelled", "the request was cancelled")
    assert plan_of(bench.finish(plan, 1.0)[0]).workers == ("a",)
    assert bench.idle() == {"b", "c", "e"}


def test_c_goes_to_the_idle_one_of_its_kind_whichever_was_named() -> None:
    bench = Bench(types={**TYPES, "c2": PlacementType.C})
    bench.arrive("x", "y")
    first, second = (bench.start(ids=name, diffuse=on, encode=on, decode="c") for name, on in (("x", "a"), ("y", "b")))
    workers = [plan_of(effect).workers for plan in (first, second) for effect in bench.finish(plan, 1.0)]
    assert workers == [("c",), ("c2",)]


def test_in_the_order_planned_c_waits_for_the_worker_that_was_named() -> None:
    bench = Bench(types={**TYPES, "c2": PlacementType.C}, options=SchedulerOptions(decode_order="planned"))
    bench.arrive("x", "y")
    first, second = (bench.start(ids=name, diffuse=on, encode=on, decode="c") for name, on in (("x", "a"), ("y", "b")))
    (effect,) = bench.finish(first, 1.0)
    assert plan_of(effect).workers == ("c",)
    assert bench.finish(second, 2.0) == []
    *_, effect = bench.finish(plan_of(effect), 3.0)
    assert (plan_of(effect).workers, plan_of(effect).request_ids) == (("c",), ("y",))


@pytest.mark.parametrize(("order", "expected"), [("urgent", "soon"), ("fifo", "far")])
def test_of_those_whose_c_waits_the_most_urgent_goes_first(order: DecodeOrder, expected: str) -> None:
    """`far` has waited longer; both wait for the one decoder, which `busy` has."""
    bench = Bench(options=SchedulerOptions(decode_order=order))
    plans = {}
    for name, slo_s in (("busy", 1000.0), ("far", 900.0), ("soon", 50.0)):
        bench.on(ev.RequestArrived(make_request(name, slo_s=slo_s)))
        plan = bench.start(ids=name, decode="c")
        plans[name] = [plan_of(effect) for effect in bench.finish(plan, 1.0)]
    assert [len(decodes) for decodes in plans.values()] == [1, 0, 0]
    *_, effect = bench.finish(plans["busy"][0], 3.0)
    assert plan_of(effect).request_ids == (expected,)


def test_what_a_lost_worker_kept_begins_again() -> None:
    bench = Bench()
    bench.arrive("r")
    bench.finish(bench.start(decode="", num_steps=2), 1.0)
    assert bench.pending() == {"r": (2, True, "a")}
    (effect,) = bench.on(ev.WorkerLost("a", "gone"), 2.0)
    assert isinstance(effect, ev.Requeue)
    assert bench.pending() == {"r": (0, False, None)}


def test_a_refused_request_ends() -> None:
    bench = Bench()
    bench.arrive("r")
    (effect,) = bench.decide(Decisions(refusals=[Refusal("r", "hopeless")]))
    assert effect == ev.Reject("r", "deadline_missed", "hopeless")
    assert bench.decide(Decisions(refusals=[Refusal("r", "hopeless")])) == []


def test_a_new_placement_is_in_force_at_once_and_loads_count_until_they_are_done() -> None:
    types = {**TYPES, "c": PlacementType.EDC}
    replan = Replan(PlacementPlan(workers_of(types)[1].replicas, "more EDC", epoch=1))
    bench = Bench(replan)
    bench.arrive("r")
    (effect,) = bench.decide(Decisions(), 1.0)
    assert isinstance(effect, ev.Place)
    line = encode_entry(LogEntry(1.0, ev.Tick(), [effect]))
    assert decode_entry(line) == LogEntry(1.0, ev.Tick(), [effect])
    assert bench.script.seen is not None
    view = next(view for view in bench.script.seen.workers if view.worker_id == "c")
    assert view.resident == frozenset({Replica(MODEL, C)}) < view.replicas
    bench.start(1.0, diffuse="c", encode="c", decode="c")
    # E and D have to be loaded: 3 s each by the fake times, before 0.5 + 4 + 2 s of work.
    assert bench.scheduler._pool.free_at_s("c", 1.0) == 1.0 + 6.0 + 6.5
    bench.on(ev.ReplicaLoaded("c", Replica(MODEL, D), (), "peer", 1, 3.0), 4.0)
    assert bench.scheduler._pool.list_missing("c", [Replica(MODEL, D)]) == []
    assert replan.arrivals == ["r"]


def test_decode_goes_elsewhere_when_its_worker_is_not_meant_to_hold_it_any_more() -> None:
    types = {**TYPES, "c": PlacementType.E, "e": PlacementType.C}
    bench = Bench(replan := Replan())
    bench.arrive("r")
    plan = bench.start(decode="c")
    bench.on(ev.ReplicaLoaded("c", Replica(MODEL, E), (Replica(MODEL, C),), "peer", 1, 3.0))
    replan.plan = PlacementPlan(workers_of(types)[1].replicas)
    bench.on(ev.Tick())
    (effect,) = bench.finish(plan, 5.0)
    assert plan_of(effect).workers != ("c",)
    assert [(report.span.stage, report.kind, report.requests) for report in replan.reports] == [
        (E, PlacementType.EDC, 1), (D, PlacementType.EDC, 1),
    ]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from("asynfpclb"), st.integers(0, 5)), max_size=60))
def test_whatever_happens_every_request_ends_once_and_all_workers_are_free(actions: list[tuple[str, int]]) -> None:
    """Random arrivals, batches, segments, yields, stages and plans that end, failures, cancels and losses; then all is
    let end."""
    bench = Bench()
    plans: dict[int, DispatchPlan] = {}
    computed: set[int] = set()
    ended: list[str] = []
    names = 0

    def take(effects: Sequence[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.RunPlan():
                    plans[effect.plan.plan_id] = effect.plan
                case ev.Finish() | ev.Reject():
                    ended.append(effect.request_id)
                case _:
                    pass

    def dispatch(limit: int, num_steps: int | None, width: int = 2) -> None:
        waiting = list(bench.scheduler._ledger.pending.values())[:limit]
        free = [worker for worker in ("a", "b") if worker in bench.idle()][:width]
        if not waiting or not free:
            return
        left = min(view.spec.num_inference_steps - view.steps_done for view in waiting)
        stops = num_steps is not None and num_steps < left
        where = assignment(
            " ".join(view.spec.request_id for view in waiting),
            diffuse=" ".join(free),
            encode="" if all(view.encoded for view in waiting) else "e",
            decode="" if stops else free[0],
            num_steps=num_steps,
        )
        take(bench.decide(Decisions([where])))

    def end(plan: DispatchPlan, steps: int | None) -> None:
        ran = plan.stages if steps is None else [stage for stage in plan.stages if stage is not C]
        spans = tuple(StageSpan(stage, 0.0, 1.0) for stage in ran)
        take(bench.on(ev.StageFinished(plan.plan_id, spans, steps), 1.0))

    for action, number in actions:
        plan = next(iter(plans.values()), None)
        match action:
            case "a":
                names += 1
                bench.arrive(f"r{names}", steps=1 + number)
            case "s":
                dispatch(1 + number % 3, None, 1 + number // 3)
            case "n":
                dispatch(1 + number % 3, 1, 1 + number // 3)
            case "y" if plan is not None:
                take(bench.decide(Decisions(preemptions=[Preemption(plan.request_ids[0], "")])))
            case "f" if plan is not None:
                del plans[plan.plan_id]
                may_pause = D in plan.stages and number and plan.plan_id not in computed
                end(plan, min(number, plan.num_steps) if may_pause else None)
            case "p" if plan is not None and C in plan.stages:
                computed.add(plan.plan_id)
                take(bench.on(ev.PlanComputed(plan.plan_id), 1.0))
            case "b" if plan is not None:
                del plans[plan.plan_id]
                take(bench.on(ev.PlanFailed(plan.plan_id, "broken"), 1.0))
            case "c" if names:
                take(bench.on(ev.RequestCancelled(f"r{1 + number % names}"), 1.0))
            case "l":
                take(bench.on(ev.WorkerLost("a", "gone"), 1.0))
                bench.on(ev.WorkerJoined(WorkerSpec("a", "node", 100), number), 1.0)
            case _:
                pass
    for _ in range(200):
        dispatch(1, None)
        for plan_id in list(plans):
            end(plans.pop(plan_id), None)
    assert sorted(ended) == sorted(f"r{i + 1}" for i in range(names))
    assert bench.idle() == set(TYPES)
    assert not bench.scheduler._ledger.runs
