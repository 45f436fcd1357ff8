"""Which workers are set aside, as plans fail there, and where requests that have failed are tried again."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.simulated.greedy import Greedy
from tests.scheduling.fakes import FixedDispatcher, sole
from tests.scheduling.test_scheduler import Run
from tridentserve.plans import DispatchPlan, StageSpan, WorkerId
from tridentserve.protocols import ClusterView, Decisions, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry, decode_entry, encode_entry, replay
from tridentserve.scheduling.scheduler import Scheduler, SchedulerOptions
from tridentserve.scheduling.workers.fault_watch import FaultWatch
from tridentserve.scheduling.workers.worker_pool import WorkerPool
from tridentserve.stages import PlacementType
from tridentserve.testing import FixedTimes, make_cluster, make_request

ASIDE_S, RUN_S, FAIL_S = 30.0, 6.0, 0.02


class Watch:
    """Three workers of one kind, and what is known of their faults."""

    def __init__(self, max_failures: int | None = 3, types: str = "EDC EDC EDC") -> None:
        specs, placement = make_cluster({f"w{number}": kind for number, kind in enumerate(types.split())})
        self.pool = WorkerPool(specs, placement)
        for spec in specs:
            self.pool.join(spec, 0)
        self.faults = FaultWatch(self.pool, max_failures, ASIDE_S)

    def fail(self, worker_id: WorkerId, *names: str, now_s: float = 0.0) -> list[ev.Effect]:
        self.faults.note_failure(names, (worker_id,))
        return self.faults.review(now_s)

    def succeed(self, worker_id: WorkerId, now_s: float = 0.0) -> list[ev.Effect]:
        plan = DispatchPlan(0, "m", (), (worker_id,), ())
        return self.faults.note_success(plan) + self.faults.review(now_s)

    def end(self, name: str, is_well: bool, now_s: float = 0.0) -> list[ev.Effect]:
        self.faults.note_ends([ev.Finish(name, 1.0, 1.0, "") if is_well else ev.Reject(name, "worker_failed", "")])
        return self.faults.review(now_s)

    @property
    def taking(self) -> list[WorkerId]:
        return [view.worker_id for view in self.pool.list_views()]


@pytest.fixture
def watch() -> Watch:
    """Different requests have failed twice on w0, and another worker has run a plan."""
    made = Watch()
    assert made.fail("w0", "a") + made.fail("w0", "b") + made.succeed("w1") == []
    return made


def test_a_worker_that_fails_different_requests_is_set_aside(watch: Watch) -> None:
    (aside,) = watch.fail("w0", "c", now_s=5.0)
    assert aside == ev.SetAside("w0", "3 plans in a row failed there, and others ran elsewhere", 5.0 + ASIDE_S)
    assert watch.taking == ["w1", "w2"]
    assert (watch.faults.list_aside(), watch.faults.find_until_s("w0")) == (["w0"], 35.0)
    assert watch.faults.find_until_s("w1") is None


def test_each_time_for_twice_as_long_and_one_failure_is_enough_then(watch: Watch) -> None:
    watch.fail("w0", "c", now_s=0.0)
    now_s, spans_s = ASIDE_S, []
    for name in "defghij":
        assert watch.faults.review(now_s - 0.1) == []
        assert watch.faults.review(now_s) == [ev.SetAside("w0", "it is tried again", None)]
        assert watch.taking == ["w0", "w1", "w2"]
        (aside,) = watch.fail("w0", name, now_s=now_s)
        assert isinstance(aside, ev.SetAside)
        assert aside.until_s is not None
        spans_s.append(aside.until_s - now_s)
        now_s = aside.until_s
    assert spans_s == [60.0, 120.0, 240.0, 480.0, 960.0, 960.0, 960.0]


def test_a_plan_that_ends_well_ends_the_streak(watch: Watch) -> None:
    assert watch.succeed("w0") == []
    assert watch.fail("w0", "c") + watch.fail("w0", "d") == []
    watch.succeed("w1")
    assert watch.fail("w0", "e", now_s=1.0) != []
    assert watch.succeed("w0") == [ev.SetAside("w0", "a plan has ended well there", None)]
    assert watch.taking == ["w0", "w1", "w2"]


def test_a_new_process_is_given_plans(watch: Watch) -> None:
    watch.fail("w0", "c")
    assert watch.faults.note_join("w0") == [ev.SetAside("w0", "it has started again", None)]
    assert watch.faults.note_join("w1") == []
    assert watch.fail("w0", "d", now_s=1.0) == [
        ev.SetAside("w0", "3 plans in a row failed there, and others ran elsewhere", 1.0 + 2 * ASIDE_S)
    ]


def test_nobody_is_set_aside_while_nothing_runs_elsewhere() -> None:
    """Then it is the service that fails."""
    watch = Watch()
    assert [watch.fail("w0", name) for name in "abcdef"] == [[]] * 6
    assert watch.succeed("w1") != []


def test_the_last_one_that_holds_something_is_not_set_aside() -> None:
    for types, is_aside in (("EDC EDC EDC", True), ("EDC ED ED", False), ("EDC D E C", True)):
        watch = Watch(types=types)
        watch.fail("w0", "a")
        watch.succeed("w1")
        assert ([watch.fail("w0", name) for name in "bc"][-1] != []) is is_aside, types


def test_one_request_alone_makes_no_streak(watch: Watch) -> None:
    assert [watch.fail("w0", "b") for _ in range(9)] == [[]] * 9


def test_requests_that_fail_elsewhere_too_do_not_count(watch: Watch) -> None:
    watch.fail("w0", "c")
    assert watch.fail("w2", "c") == [ev.SetAside("w0", "its requests have failed elsewhere too", None)]
    watch.fail("w2", "a")
    watch.fail("w2", "b")
    watch.succeed("w1")
    assert watch.fail("w0", "d") == []
    for name in "abc":
        assert watch.end(name, is_well=False) == []
    assert watch.fail("w0", "e") == []
    assert watch.fail("w0", "f") != [], "the three are forgotten"


def test_they_count_on_all_where_they_ended_well_at_last(watch: Watch) -> None:
    """Two workers are broken."""
    watch.fail("w0", "c")
    for name in "abc":
        watch.fail("w2", name)
    assert watch.faults.list_aside() == []
    watch.succeed("w1")
    effects = [effect for name in "abc" for effect in watch.end(name, is_well=True)]
    assert [(effect.worker_id, effect.until_s) for effect in effects if isinstance(effect, ev.SetAside)] == [
        ("w0", ASIDE_S),
        ("w2", ASIDE_S),
    ]
    assert watch.taking == ["w1"]


def test_a_batch_counts_once_and_not_where_one_of_it_is_at_fault(watch: Watch) -> None:
    watch.fail("w0", "poison", "x", "y")
    assert watch.faults.list_aside() == ["w0"]
    assert watch.fail("w1", "poison") == [ev.SetAside("w0", "its requests have failed elsewhere too", None)]


def test_a_request_that_was_given_up_at_once_counts() -> None:
    """With `max_retries` 0 none is ever tried elsewhere."""
    watch = Watch()
    for name in "ab":
        watch.fail("w0", name)
        watch.end(name, is_well=False)
    watch.succeed("w1")
    watch.fail("w0", "c")
    assert watch.faults.list_aside() == ["w0"]


def test_none_is_set_aside_without_a_number() -> None:
    watch = Watch(max_failures=None)
    assert [watch.fail("w0", name) + watch.succeed("w1") for name in "abcdef"] == [[]] * 6
    assert watch.faults.find_shunned("ab") == {"w0"}


def test_nothing_is_kept_of_requests_that_have_ended(watch: Watch) -> None:
    watch.end("a", is_well=True)
    watch.end("b", is_well=False)
    assert watch.faults.find_shunned("ab") == frozenset()
    watch.succeed("w0")
    assert not watch.faults.knows_failures


# With the scheduler.


@dataclass
class Service:
    """A scheduler with workers of which some fail each plan, and requests of which some fail wherever they run."""

    bad: frozenset[WorkerId]
    poison: frozenset[str]
    num_workers: int
    degree: int = 1
    batch: int = 1
    max_retries: int = 2

    def make_scheduler(self) -> Scheduler:
        specs, placement = make_cluster({f"w{number}": "EDC" for number in range(self.num_workers)})
        options = SchedulerOptions(max_retries=self.max_retries, aside_s=ASIDE_S, checkpoint_s=0.0)
        return Scheduler(specs, placement, FixedTimes(max_batch=self.batch), self.make_policy(), options)

    def make_policy(self) -> Greedy:
        return Greedy(degree=self.degree, batch=self.batch)

    def run(self, arrivals: Sequence[tuple[float, RequestSpec]]) -> None:
        """Plans end after a time that is always the same."""
        self.scheduler, self.log = self.make_scheduler(), list[LogEntry]()
        self.ran_on = defaultdict[str, list[str]](list)
        numbers = itertools.count()
        queue: list[tuple[float, int, ev.Event]] = []

        def post(at_s: float, event: ev.Event) -> None:
            heapq.heappush(queue, (at_s, next(numbers), event))

        for worker, _ in self.scheduler._pool.list_all():
            post(0.0, ev.WorkerJoined(worker))
        for at_s, spec in arrivals:
            post(at_s, ev.RequestArrived(spec))
        while queue:
            now_s, _, event = heapq.heappop(queue)
            for each in (event, ev.Tick()):
                effects = self.scheduler.on(each, now_s)
                self.log.append(LogEntry(now_s, each, effects))
                for effect in effects:
                    if isinstance(effect, ev.RunPlan):
                        post(*self._end(effect.plan, now_s))
            if now_s < 2000.0 and self.scheduler.num_pending and not queue:
                post(now_s + 1.0, ev.Tick())

    def _end(self, plan: DispatchPlan, now_s: float) -> tuple[float, ev.Event]:
        for name in plan.request_ids:
            self.ran_on[name] += plan.workers
        faulty = self.bad.intersection(plan.workers)
        if faulty or self.poison.intersection(plan.request_ids):
            who = tuple(sorted(faulty)) or plan.workers[:1]
            return now_s + FAIL_S, ev.PlanFailed(plan.plan_id, "AcceleratorError", workers=who)
        spans = [StageSpan(stage, now_s, now_s + RUN_S, plan.workers, plan.num_steps or None) for stage in plan.stages]
        return now_s + RUN_S, ev.StageFinished(plan.plan_id, tuple(spans))

    def list_effects(self) -> list[ev.Effect]:
        return [effect for entry in self.log for effect in entry.effects]


def spread(number: int, gap_s: float) -> list[tuple[float, RequestSpec]]:
    return [(gap_s * index, make_request(f"r{index}")) for index in range(number)]


@given(
    num_workers=st.integers(2, 8),
    num_bad=st.integers(0, 2),
    poison=st.frozensets(st.sampled_from([f"r{index}" for index in range(24)]), max_size=6),
    gap_s=st.sampled_from([0.0, 0.1, 1.0, 4.0]),
    degree=st.sampled_from([1, 2]),
    batch=st.integers(1, 3),
)
def test_whatever_fails_only_requests_at_fault_end_without_a_result(
    num_workers: int, num_bad: int, poison: frozenset[str], gap_s: float, degree: int, batch: int
) -> None:
    """And no worker is set aside for long that does what it is given."""
    if batch > 1 and poison:  # a request that fails beside one at fault has one try fewer
        num_bad = min(num_bad, 1)
    bad = frozenset(f"w{index}" for index in range(min(num_bad, num_workers - 1)))
    service = Service(bad, poison, num_workers, degree, batch)
    service.run(spread(24, gap_s))
    ended = {
        effect.request_id: type(effect)
        for effect in service.list_effects()
        if isinstance(effect, ev.Finish | ev.Reject)
    }
    assert ended == {name: ev.Reject if name in poison else ev.Finish for name in (f"r{i}" for i in range(24))}
    assert service.scheduler._faults.find_shunned(ended) == frozenset(), "nothing is kept of requests that have ended"
    assert set(service.scheduler._faults.list_aside()) <= bad
    for name, workers in service.ran_on.items():
        if degree == batch == 1 and name not in poison:
            assert len(set(workers)) == len(workers), f"{name} was tried again where it had failed: {workers}"
    decoded = [decode_entry(encode_entry(entry)) for entry in service.log]
    assert decoded == service.log
    assert all(entry.effects == effects for entry, effects in replay(decoded, service.make_scheduler()))


def test_a_request_is_tried_again_where_it_failed_if_nothing_else_can_run_it() -> None:
    service = Service(frozenset(), frozenset({"r0"}), 1)
    service.run(spread(2, 0.0))
    assert service.ran_on["r0"] == ["w0"] * 3
    assert [effect.request_id for effect in service.list_effects() if isinstance(effect, ev.Finish)] == ["r1"]
    assert not [effect for effect in service.list_effects() if isinstance(effect, ev.SetAside)]


def test_it_waits_for_another_worker_and_lets_others_have_the_idle_one() -> None:
    service = Service(frozenset({"w0"}), frozenset(), 2)
    service.run(spread(3, 0.0))
    assert service.ran_on == {"r0": ["w0", "w1"], "r1": ["w1"], "r2": ["w0", "w1"]}


# A lone C, whose worker is chosen when it is due.

DECODERS = {"e": PlacementType.E, "d": PlacementType.D, "c": PlacementType.C, "c2": PlacementType.C}


def run_to_decode(run: Run, start_s: float) -> list[ev.Effect]:
    """E and D of the request that waits; returns what comes of their end."""
    (effect,) = run.finish(run.plan(ev.Tick(), start_s), start_s, start_s + 1.0)
    assert isinstance(effect, ev.RunPlan)
    return run.finish(effect.plan, start_s + 1.0, start_s + 2.0)


def find_plan(effects: Sequence[ev.Effect]) -> DispatchPlan:
    (effect,) = [effect for effect in effects if isinstance(effect, ev.RunPlan)]
    return effect.plan


def test_a_decode_waits_for_a_worker_on_which_it_has_not_failed() -> None:
    run = Run(FixedDispatcher("e", "d", "c"), DECODERS)
    run.on(ev.RequestArrived(make_request("a")))
    first = find_plan(run_to_decode(run, 0.0))
    run.on(ev.RequestArrived(make_request("b")))
    second = find_plan(run_to_decode(run, 10.0))
    assert (first.workers, second.workers) == (("c",), ("c2",))
    (requeued,) = run.on(ev.PlanFailed(second.plan_id, "AcceleratorError", workers=("c2",)), 20.0)
    assert isinstance(requeued, ev.Requeue)
    assert run_to_decode(run, 20.0) == [], "c2 is idle"
    ended, again = run.finish(first, 12.0, 30.0)
    assert isinstance(ended, ev.Finish)
    assert find_plan([again]).workers == ("c",)


@pytest.mark.parametrize(("aside", "worker_id"), [({"c"}, "c2"), ({"c", "c2"}, "c"), (set[str](), "c")])
def test_a_decode_goes_round_workers_that_are_set_aside(aside: set[WorkerId], worker_id: WorkerId) -> None:
    """Unless all are."""
    run = Run(FixedDispatcher("e", "d", "c"), DECODERS)
    run.on(ev.RequestArrived(make_request("a")))
    for each in aside:
        run.scheduler._pool.set_aside(each, True)
    assert find_plan(run_to_decode(run, 0.0)).workers == (worker_id,)


def test_nothing_is_kept_of_a_request_that_is_given_up_when_it_is_due() -> None:
    """It has failed at C once, and the worker for which it waits is lost."""
    run = Run(FixedDispatcher("e", "d", "c"), {name: DECODERS[name] for name in ("e", "d", "c")}, max_retries=1)
    run.on(ev.RequestArrived(make_request("a")))
    first = find_plan(run_to_decode(run, 0.0))
    run.on(ev.RequestArrived(make_request("b")))
    assert run_to_decode(run, 2.0) == []
    _, given = run.on(ev.PlanFailed(first.plan_id, "AcceleratorError", workers=("c",)), 10.0)
    assert sole(find_plan([given])).request_id == "b"
    assert run_to_decode(run, 10.0) == []
    assert run.scheduler._faults.find_shunned("a") == {"c"}
    (rejected,) = run.on(ev.WorkerLost("c", "killed"), 20.0)
    assert isinstance(rejected, ev.Reject)
    assert run.scheduler._faults.find_shunned("a") == frozenset()


class Needs(Greedy):
    """It can run with two workers, and no fewer."""

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return None if len(workers) > 1 else "one worker is not enough"

    def decide(self, view: ClusterView) -> Decisions:
        return super().decide(view) if len(view.workers) > 1 else Decisions()


def test_those_set_aside_are_given_plans_where_nothing_else_can_run_them() -> None:
    class Shared(Service):
        def make_policy(self) -> Greedy:
            return Needs(degree=1)

    service = Shared(frozenset({"w0"}), frozenset(), 2, max_retries=9)
    service.run([*spread(8, 0.0), (7.0, make_request("late"))])
    changes = [effect for effect in service.list_effects() if isinstance(effect, ev.SetAside)]
    assert [change.until_s is None for change in changes][:2] == [False, True]
    assert changes[1].reason == "no other worker can run what waits"
    assert service.scheduler.num_pending == 0


def test_a_policy_that_fails_when_it_is_asked_what_can_run_ends_nothing() -> None:
    class Fails(Greedy):
        def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
            if len(workers) < 2:
                raise ValueError("two workers")
            return None

    class Unsure(Service):
        def make_policy(self) -> Greedy:
            return Fails(degree=1)

    service = Unsure(frozenset(), frozenset({"r0"}), 2)
    service.run(spread(3, 0.0))
    assert service.scheduler.num_pending == 0
