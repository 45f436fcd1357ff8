"""Properties of every step-level policy, in any view and over whole runs; and how much work a decision is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.policies.related.dit_serve import DitServe
from dispatch.policies.related.genserve import GenServe
from dispatch.policies.related.job_orders import JOB_ORDERS
from dispatch.policies.related.patchedserve import PatchedServe
from dispatch.policies.related.tetriserve import TetriServe
from tests.dispatch.cluster import request, worker, workers
from tests.dispatch.policies.step_engine import BATCHES, LARGE, MIDDLE, SMALL, TIMES, VIDEO, StepEngine, check, running
from tests.profiler.synthetic import EDC_BYTES, MIB
from tests.support.work import calls_in
from tridentserve.protocols import ClusterView, Dispatcher, PendingRequest, WorkerView
from tridentserve.requests import Shape

MAKERS: list[Callable[[], Dispatcher]] = [
    lambda: TetriServe(TIMES),
    lambda: GenServe(TIMES, BATCHES),
    lambda: DitServe(TIMES, BATCHES, JOB_ORDERS["srptf"]),
    lambda: DitServe(TIMES, BATCHES, JOB_ORDERS["fcfs"]),
    lambda: PatchedServe(TIMES, BATCHES),
]
NAMES = ["tetriserve", "genserve", "dit-serve", "dit-serve-fcfs", "patchedserve"]
each_policy = pytest.mark.parametrize("make", MAKERS, ids=NAMES)
SHAPES = (SMALL, MIDDLE, LARGE, VIDEO)
# Twice what they make now: a loop over requests x workers more would make several times as many.
MOST_CALLS = 60_000


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    """Two nodes of one kind of primaries with auxiliaries, some busy, some of them with requests in D."""
    kind = draw(st.sampled_from(["EDC", "DC", "ED", "D"]))
    memory_bytes = draw(st.sampled_from([EDC_BYTES, 2 * EDC_BYTES, 1300 * MIB]))
    cluster: list[WorkerView] = []
    active = []
    for node in ("a", "b"):
        for i in range(draw(st.integers(1, 4))):
            free_at_s = draw(st.sampled_from([None, None, 11.0]))
            cluster.append(worker(f"{node}{i}", kind, node=node, free_at_s=free_at_s, memory_bytes=memory_bytes))
            if free_at_s is not None and draw(st.booleans()):
                spec = request(f"on-{node}{i}", draw(st.sampled_from(SHAPES)), draw(st.floats(1, 60)), steps_done=3)
                active.append(running(spec, f"{node}{i}", yielding=draw(st.booleans())))
    cluster += [worker("e", "E"), worker("c", "C", free_at_s=12.0)]
    pending = []
    for i in range(draw(st.integers(1, 8))):
        steps, slo_s = draw(st.integers(1, 20)), draw(st.floats(0.1, 60))
        done = draw(st.integers(0, steps - 1))
        alone = draw(st.sampled_from([False, False, True]))
        made = request(f"r{i}", draw(st.sampled_from(SHAPES)), slo_s, steps=steps, steps_done=done, alone=alone)
        encoded = done > 0 or draw(st.booleans())
        held_by = draw(st.sampled_from([each.worker_id for each in cluster])) if encoded else None
        pending.append(PendingRequest(made.spec, 0.0, made.deadline_s, done, encoded, held_by))
    return ClusterView(10.0, pending, active, cluster)


@each_policy
@settings(max_examples=60)
@given(view=views())
def test_decisions_can_be_carried_out_and_repeat(make: Callable[[], Dispatcher], view: ClusterView) -> None:
    decisions = make().decide(view)
    check(view, decisions)
    assert make().decide(view) == decisions


@each_policy
@settings(max_examples=15)
@given(
    draws=st.lists(
        st.tuples(st.sampled_from(SHAPES), st.integers(1, 12), st.floats(0, 3), st.floats(0.2, 20)), max_size=14
    )
)
def test_every_request_ends_once(make: Callable[[], Dispatcher], draws: list[tuple[Shape, int, float, float]]) -> None:
    requests = [
        request(f"r{i:02}", shape, slo_s, steps=steps, arrival_s=arrival_s)
        for i, (shape, steps, arrival_s, slo_s) in enumerate(draws)
    ]
    engines = [StepEngine(make(), workers(4, "EDC")) for _ in range(2)]
    for engine in engines:
        engine.play(requests)
        assert sorted([*engine.finish_s, *engine.refused]) == [each.spec.request_id for each in requests]
    assert engines[0].log == engines[1].log


@each_policy
def test_what_cannot_run_waits_and_is_said(make: Callable[[], Dispatcher]) -> None:
    policy = make()
    unknown = request("r", SMALL, model="nobody")
    view = ClusterView(0.0, [unknown], (), workers(2, "EDC"))
    decisions = policy.decide(view)
    assert not decisions.assignments
    assert not decisions.refusals
    assert "nobody" in (policy.can_ever_run(unknown.spec, view.workers) or "")
    assert policy.can_ever_run(request("r", SMALL).spec, view.workers) is None


@each_policy
@pytest.mark.parametrize("num_idle", [128, 40])
def test_a_decision_on_a_large_cluster_is_bounded_work(make: Callable[[], Dispatcher], num_idle: int) -> None:
    """128 workers, 100 requests wait."""
    generator = random.Random(1)
    cluster: list[WorkerView] = []
    active = []
    for i in range(128):
        name, node = f"w{i:03}", f"n{i // 8:02}"
        cluster.append(worker(name, "EDC", node=node, free_at_s=None if i < num_idle else 20.0))
        if i >= num_idle:
            active.append(running(request(f"on-{i}", generator.choice(SHAPES), 60.0, steps_done=3), name))
    pending = [
        request(f"r{i:03}", generator.choice(SHAPES), generator.uniform(2, 60), steps=generator.randint(4, 50))
        for i in range(100)
    ]
    view = ClusterView(1.0, pending, active, cluster)
    assert make().decide(view).assignments
    policy = make()
    assert calls_in(lambda: policy.decide(view)) < MOST_CALLS
