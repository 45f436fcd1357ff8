"""What an onlooker is told of a cluster, against the scheduler that drives it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.fakes import FakeTimes, FixedDispatcher, workers_of
from tridentserve.plans import DispatchPlan, PlacementPlan, StageSpan
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.scheduling.watching.cluster_state import (
    Attainment,
    ClusterState,
    EndedStage,
    HandoffLevel,
    WatchedWorker,
    combine_states,
)
from tridentserve.scheduling.watching.recent_history import ATTAINMENT_S, HISTORY_S, MAX_STAGES, RecentHistory
from tridentserve.stages import PlacementType, Stage
from tridentserve.testing import MODEL, make_request

TYPES = {"e": PlacementType.E, "d0": PlacementType.D, "d1": PlacementType.D, "c": PlacementType.C}


class Watched:
    """A scheduler with its history, on workers that do as they are told."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(*workers_of(TYPES), FakeTimes(), FixedDispatcher("e", "d0 d1", "c"))
        self.history = RecentHistory()
        self.running: list[DispatchPlan] = []
        for spec in workers_of(TYPES)[0]:
            self.on(ev.WorkerJoined(spec), 0.0)

    def on(self, event: ev.Event, now_s: float) -> None:
        effects = self.scheduler.on(event, now_s)
        self.history.apply(event, effects, now_s)
        self.running += [effect.plan for effect in effects if isinstance(effect, ev.RunPlan)]

    def finish_next(self, start_s: float, end_s: float) -> None:
        """The oldest plan ends; its stages share its time."""
        plan = self.running.pop(0)
        width_s = (end_s - start_s) / len(plan.stages)
        spans = tuple(
            StageSpan(stage, start_s + i * width_s, start_s + (i + 1) * width_s, plan.workers_of(stage))
            for i, stage in enumerate(plan.stages)
        )
        self.on(ev.StageFinished(plan.plan_id, spans), end_s)

    def describe(self, now_s: float) -> ClusterState:
        return self.history.complete(self.scheduler.describe_cluster(now_s), {"e": HandoffLevel(3, 10)})


def find_worker(state: ClusterState, worker_id: str) -> WatchedWorker:
    (worker,) = (worker for worker in state.workers if worker.worker_id == worker_id)
    return worker


def test_a_request_is_seen_on_its_way() -> None:
    watched = Watched()
    watched.on(ev.RequestArrived(make_request("a")), 1.0)
    waiting = watched.describe(1.5)
    assert [(r.request_id, r.running, r.arrival_s, r.size) for r in waiting.requests] == [("a", False, 1.0, "512x512")]
    assert [(c.model, c.waiting, c.running, c.oldest_s) for c in waiting.classes] == [(MODEL, 1, 0, 1.0)]
    assert not any(worker.plans for worker in waiting.workers)

    watched.on(ev.Tick(), 2.0)
    encoding = watched.describe(2.2)
    (plan,) = find_worker(encoding, "e").plans
    assert (plan.stages, plan.request_ids, plan.start_s, plan.end_s) == ("E", ("a",), 2.0, 2.5)
    assert find_worker(encoding, "d0").reserved_until_s is not None
    assert find_worker(encoding, "c").reserved_until_s is None
    assert [(c.waiting, c.running) for c in encoding.classes] == [(0, 1)]

    watched.finish_next(2.0, 2.5)
    (first,), (second,) = (find_worker(watched.describe(2.6), name).plans for name in ("d0", "d1"))
    assert first == second
    assert (first.stages, first.degree, first.end_s - first.start_s) == ("D", 2, 2.0)

    watched.finish_next(2.5, 3.0)
    watched.finish_next(3.0, 5.0)
    done = watched.describe(5.0)
    assert [(stage.stage, stage.workers) for stage in done.ended] == [("E", ("e",)), ("D", ("d0", "d1")), ("C", ("c",))]
    assert (done.num_requests, done.classes) == (0, ())
    assert done.attainment == {MODEL: Attainment(1, 1)}
    assert find_worker(done, "e").handoff == HandoffLevel(3, 10)
    assert find_worker(done, "c").handoff is None


def test_a_plan_that_waits_behind_another_begins_at_its_end() -> None:
    watched = Watched()
    for name in ("a", "b"):
        watched.on(ev.RequestArrived(make_request(name)), 0.0)
    watched.on(ev.Tick(), 0.0)
    watched.finish_next(0.0, 0.5)  # E of a
    watched.finish_next(0.5, 1.0)  # D of a: the primaries are free for b, while C of a runs
    watched.on(ev.Tick(), 1.0)
    watched.finish_next(1.0, 1.2) if watched.running[0].stages == (Stage.ENCODE,) else None
    for worker in watched.describe(1.0).workers:
        for before, after in zip(worker.plans, worker.plans[1:], strict=False):
            assert before.end_s == after.start_s


def test_attainment_leaves_out_what_was_cancelled_and_what_is_long_past() -> None:
    watched = Watched()
    watched.on(ev.RequestArrived(make_request("late", slo_s=0.1)), 0.0)
    watched.on(ev.Tick(), 0.0)
    watched.on(ev.RequestArrived(make_request("gone")), 0.0)
    watched.on(ev.RequestCancelled("gone"), 0.1)
    for start_s, end_s in ((0.0, 0.5), (0.5, 1.0), (1.0, 3.0)):
        watched.finish_next(start_s, end_s)
    assert watched.describe(3.0).attainment == {MODEL: Attainment(0, 1)}
    assert watched.describe(3.0 + ATTAINMENT_S + 1).attainment == {}


def test_a_request_that_is_overdue_counts_before_it_ends() -> None:
    watched = Watched()
    watched.on(ev.RequestArrived(make_request("a", slo_s=1.0)), 0.0)
    assert watched.describe(1.0).attainment == {}
    assert watched.describe(1.5).attainment == {MODEL: Attainment(overdue=1)}
    watched.on(ev.Tick(), 1.5)
    for start_s, end_s in ((1.5, 2.0), (2.0, 3.0), (3.0, 4.0)):
        watched.finish_next(start_s, end_s)
    assert watched.describe(4.0).attainment == {MODEL: Attainment(0, 1)}


@pytest.mark.parametrize(
    ("predicted_s", "counts"), [(None, (0, 0)), (2.0, (1, 1)), (1.41, (1, 1)), (2.61, (1, 0)), (1.0, (1, 0))]
)
def test_predictions_are_compared_with_what_came(predicted_s: float | None, counts: tuple[int, int]) -> None:
    history = RecentHistory()
    history.apply(ev.RequestArrived(make_request("a")), [], 0.0)
    history.apply(ev.Tick(), [ev.Finish("a", 2.0, 5.0, "done", predicted_s)], 2.0)
    attainment = history.complete(ClusterState(now_s=2.0), {}).attainment
    assert attainment == {MODEL: Attainment(1, 1, 0, *counts)}


def test_placements_and_losses_are_told_with_their_reasons() -> None:
    watched = Watched()
    specs, placement = workers_of(TYPES)
    watched.on(ev.ModelAdded(MODEL, "p", 2.5, PlacementPlan(placement.replicas, "more of C is needed")), 7.0)
    watched.on(ev.WorkerLost("d1", "its process has ended"), 8.0)
    state = watched.describe(9.0)
    assert [(n.at_s, n.kind, n.text) for n in state.notices[-2:]] == [
        (7.0, "placement", "more of C is needed"),
        (8.0, "worker_lost", "d1 is lost: its process has ended"),
    ]
    assert [worker.worker_id for worker in state.workers if not worker.alive] == ["d1"]
    assert len(state.workers) == len(specs)


@given(st.integers(1, 2 * MAX_STAGES), st.floats(0.001, 1.0))
def test_history_is_bounded_and_in_order(num_stages: int, gap_s: float) -> None:
    history = RecentHistory()
    plan = DispatchPlan(1, MODEL, (Stage.ENCODE,), ("e",), ())
    for number in range(num_stages):
        history.apply(ev.Tick(), [ev.RunPlan(plan, "")], number * gap_s)
        span = StageSpan(Stage.ENCODE, number * gap_s, (number + 1) * gap_s, ("e",))
        history.apply(ev.StageFinished(1, (span,)), [], (number + 1) * gap_s)
    now_s = num_stages * gap_s
    state = history.complete(ClusterState(now_s=now_s), {})
    numbers = [stage.number for stage in state.ended]
    assert numbers == list(range(num_stages - len(numbers) + 1, num_stages + 1))
    assert state.cursor == (num_stages,)
    assert 0 < len(numbers) <= MAX_STAGES
    assert all(stage.end_s > now_s - HISTORY_S for stage in state.ended)
    assert len(numbers) == min(MAX_STAGES, num_stages) or state.ended[0].end_s <= now_s - HISTORY_S + gap_s + 1e-6


def test_a_shifted_state_is_the_same_on_another_clock() -> None:
    watched = Watched()
    watched.on(ev.RequestArrived(make_request("a")), 1.0)
    watched.on(ev.Tick(), 2.0)
    watched.finish_next(2.0, 2.5)
    state = watched.describe(3.0)
    moved = state.shift(1024.0)
    assert moved != state
    assert moved.shift(-1024.0) == state
    assert moved.requests[0].deadline_s - moved.now_s == pytest.approx(state.requests[0].deadline_s - state.now_s)


def test_states_of_cells_add_up_and_a_lost_cell_keeps_its_place() -> None:
    def make_state(name: str, number: int) -> ClusterState:
        stage = EndedStage(number, 1, MODEL, "E", (name,), ("r",), 0.0, 1.0)
        worker = WatchedWorker(name, "n", True, "m:EDC")
        attainment = {MODEL: Attainment(1, 2, 3, 4, 5)}
        return ClusterState(
            float(number), (worker,), num_requests=3, attainment=attainment, ended=(stage,), cursor=(number,)
        )

    both = combine_states([make_state("a", 5), make_state("b", 9)], (0, 0))
    assert [worker.worker_id for worker in both.workers] == ["a", "b"]
    assert (both.now_s, both.num_requests, both.attainment, both.cursor) == (
        9.0,
        6,
        {MODEL: Attainment(2, 4, 6, 8, 10)},
        (5, 9),
    )
    one = combine_states([None, make_state("b", 9)], (4, 8))
    assert (one.cursor, [stage.number for stage in one.ended]) == ((4, 9), [9])


def test_the_description_reads_and_changes_nothing() -> None:
    """The decisions are the same whether anybody watches or not."""
    seen, unseen = Watched(), Watched()
    for watched in (seen, unseen):
        watched.on(ev.RequestArrived(make_request("a")), 1.0)
        if watched is seen:
            seen.scheduler.describe_cluster(1.5)
        watched.on(ev.Tick(), 2.0)
    assert seen.running == unseen.running
