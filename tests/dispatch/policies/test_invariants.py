"""Properties of every policy in every situation: workers, stages, no request twice; and it is a function."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch import DispatchOptions
from dispatch.policies import POLICIES, make_policy
from placement import Orchestrator
from tests.dispatch.policies.scenes import LOAD, cluster, views
from tests.profiler.synthetic import DEGREES, SHAPES, cost_model
from tridentserve.cluster import WorkerSpec
from tridentserve.plans import Replica
from tridentserve.protocols import ClusterView, PendingRequest, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.stages import Stage

TIMES = cost_model()
OPTIONS = DispatchOptions(time_limit_s=30.0)


@dataclass(frozen=True)
class Moment:
    specs: list[WorkerSpec]
    busy_until_s: dict[str, float]
    pending: list[PendingRequest]
    now_s: float


@st.composite
def moments(draw: st.DrawFn) -> Moment:
    specs = cluster(*draw(st.lists(st.integers(2, 5), min_size=2, max_size=3)))
    busy = draw(st.lists(st.sampled_from([spec.worker_id for spec in specs]), unique=True))
    pending, whole = [], draw(st.sampled_from((False, False, True)))
    for i in range(draw(st.integers(1, 8))):
        steps, num_outputs = draw(st.sampled_from((4, 20))), draw(st.integers(1, 2))
        spec = RequestSpec(f"r{i}", "one", draw(st.sampled_from(SHAPES)), steps, num_outputs, whole=whole)
        done = 0 if whole else draw(st.sampled_from((0, 0, 1, 3, steps)))
        arrival_s, slo_s = draw(st.floats(0, 50)), draw(st.floats(0.01, 100))
        encoded = done > 0 or draw(st.booleans())
        pending.append(PendingRequest(spec, arrival_s, arrival_s + slo_s, done, encoded))
    return Moment(specs, {name: 50.0 + i for i, name in enumerate(busy)}, pending, now_s=50.0)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25)
@given(moment=moments())
def test_assignments_can_be_carried_out(name: str, moment: Moment) -> None:
    policy = make_policy(name, TIMES, moment.specs, LOAD, OPTIONS)
    orchestrated = Orchestrator(TIMES, 0, DEGREES, one_pool=True).plan(LOAD, moment.specs)
    workers = views(moment.specs, policy.placement or orchestrated, moment.busy_until_s)
    view = ClusterView(moment.now_s, moment.pending, (), workers)
    decisions = policy.dispatcher.decide(view)

    again = make_policy(name, TIMES, moment.specs, LOAD, OPTIONS).dispatcher.decide(view)
    assert (*again.assignments,) == (*decisions.assignments,)
    if POLICIES[name].runs_whole:
        assert not decisions.preemptions
        assert all(assignment.num_steps is None for assignment in decisions.assignments)
    by_id = {worker.worker_id: worker for worker in workers}
    requests = {request.spec.request_id: request for request in moment.pending}
    named = [name for assignment in decisions.assignments for name in assignment.request_ids]
    assert len(named) == len(set(named))
    assert set(named) <= requests.keys()
    taken = [worker_id for assignment in decisions.assignments for worker_id in assignment.diffuse]
    assert len(taken) == len(set(taken))
    assert all(by_id[worker_id].idle for worker_id in taken)
    for assignment in decisions.assignments:
        members = [requests[name] for name in assignment.request_ids]
        assert len(assignment.diffuse) in DEGREES
        assert bool(assignment.encode) == any(not member.encoded for member in members)
        left = max(member.spec.num_inference_steps - member.steps_done for member in members)
        if assignment.num_steps is None or assignment.num_steps >= left:
            assert assignment.decode
        if any(member.spec.whole for member in members):
            assert len(members) == 1
            assert assignment.num_steps is None
        assert assignment.expected_finish_s >= moment.now_s
        for stage, names in (
            (Stage.ENCODE, assignment.encode),
            (Stage.DIFFUSE, assignment.diffuse),
            (Stage.DECODE, assignment.decode),
        ):
            _check_place(stage, [by_id[name] for name in names])


def _check_place(stage: Stage, workers: list[WorkerView]) -> None:
    """All hold the stage, once each, in one node."""
    assert all(Replica("one", stage) in worker.replicas for worker in workers)
    assert len({worker.worker_id for worker in workers}) == len(workers)
    assert len({worker.node_id for worker in workers}) <= 1


@pytest.mark.parametrize("name", ["b1", "b2", "b3", "b4", "b5", "b6", "wo-scheduler", "edf"])
@settings(max_examples=20)
@given(moment=moments(), lost=st.integers(0, 2))
def test_what_was_seen_before_changes_nothing(name: str, moment: Moment, lost: int) -> None:
    policy = make_policy(name, TIMES, moment.specs, LOAD, OPTIONS)
    placement = policy.placement or Orchestrator(TIMES, 0, DEGREES, one_pool=True).plan(LOAD, moment.specs)
    before = ClusterView(moment.now_s - 1.0, moment.pending, (), views(moment.specs, placement))
    now = ClusterView(moment.now_s, moment.pending, (), views(moment.specs, placement, moment.busy_until_s)[lost:])
    policy.dispatcher.decide(before)
    fresh = make_policy(name, TIMES, moment.specs, LOAD, OPTIONS)
    assert policy.dispatcher.decide(now) == fresh.dispatcher.decide(now)


@pytest.mark.parametrize("name", POLICIES)
def test_an_idle_cluster_starts_what_can_ever_run(name: str) -> None:
    specs = cluster(8, 8)
    policy = make_policy(name, TIMES, specs, LOAD, OPTIONS)
    assert policy.name == name
    workers = views(specs, policy.placement or Orchestrator(TIMES, 0, DEGREES, one_pool=True).plan(LOAD, specs))
    for kind in LOAD:
        request = PendingRequest(RequestSpec("r", "one", kind.shape, 20), arrival_s=0.0, deadline_s=100.0)
        assert policy.dispatcher.can_ever_run(request.spec, workers) is None
        (assignment,) = policy.dispatcher.decide(ClusterView(0.0, [request], (), workers)).assignments
        assert assignment.request_ids == ("r",)
    unknown = RequestSpec("r", "nobody", SHAPES[0], 20)
    assert "nobody" in (policy.dispatcher.can_ever_run(unknown, workers) or "")
