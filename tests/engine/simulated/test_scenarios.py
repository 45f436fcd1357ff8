"""The real scheduler on simulated workers: what must hold whatever happens, and the same every time."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.simulated.greedy import Greedy
from tests.engine.simulated.scenario import Scenario, Watched, everything
from tests.support.decision_log import read_log
from tests.support.processes import output_of
from tridentserve.engine.simulated import SimulationResult
from tridentserve.plans import Replica
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import replay
from tridentserve.stages import Stage
from tridentserve.testing import find_violations

ROOT = Path(__file__).parents[3]

policies = st.builds(
    Greedy,
    degree=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 3),
    segment=st.none() | st.integers(1, 3),
    preempts=st.booleans(),
    joins=st.booleans(),
    goes_on=st.booleans(),
)
scenarios = st.builds(
    Scenario,
    seed=st.integers(0, 10_000),
    policy=policies,
    num_nodes=st.integers(1, 3),
    num_requests=st.integers(1, 25),
    num_failing=st.integers(0, 2),
    num_failures=st.integers(0, 4),
    switch_every_s=st.none() | st.sampled_from([3.0, 11.0]),
    memory_bytes=st.sampled_from([46, 56, 100]),
    solve_time=st.sampled_from([0.0, 0.3]),
    jitter=st.sampled_from([0.0, 0.3]),
    overhead_s=st.sampled_from([0.0, 0.2]),
    slowdown=st.sampled_from([(), (1.0, 1.5, 2.0)]),
    checkpoint_s=st.sampled_from([0.0, 0.5, 2.0]),
    num_cancelled=st.sampled_from([0, 0, 8]),
)


# A member is lost while another one loads for the plan, and that one's next plan needs the same weights.
LOST_WHILE_LOADING = Scenario(
    seed=4816,
    policy=Greedy(degree=4, segment=1),
    num_nodes=2,
    num_requests=7,
    num_failures=1,
    switch_every_s=11.0,
    memory_bytes=46,
    solve_time=0.0,
    jitter=0.3,
    overhead_s=0.2,
    slowdown=(1.0, 1.5, 2.0),
    checkpoint_s=0.5,
)

# Batches whose deadlines overlap: a policy that compares those of single members lets two of them preempt each other at
# every tick, before either has done a step.
OVERLAPPING_BATCHES = Scenario(
    seed=2894,
    policy=Greedy(degree=4, batch=3, segment=1, preempts=True),
    num_nodes=1,
    num_requests=19,
    num_failures=0,
    switch_every_s=11.0,
    memory_bytes=56,
    solve_time=0.0,
    jitter=0.3,
    overhead_s=0.2,
    slowdown=(1.0, 1.5, 2.0),
    checkpoint_s=2.0,
)


@given(scenarios)
@example(LOST_WHILE_LOADING)
@example(OVERLAPPING_BATCHES)
@settings(max_examples=60)
def test_nothing_is_lost_or_done_twice(scenario: Scenario) -> None:
    watched = Watched(scenario.scheduler())
    result = scenario.run(wrapped=watched)
    assert find_violations(result, scenario.workers) == []
    if not scenario.num_cancelled:  # simulated workers keep what a batch makes of one that has been cancelled
        assert scenario.left_in_buffers == 0
    assert len(result.requests) == scenario.num_requests
    ends = {"finished", "out_of_memory", "worker_failed", "invalid_request"}
    assert set(result.outcomes) <= (ends | {"cancelled"} if scenario.num_cancelled else ends)
    shares = scenario.policy.batch > 1 or scenario.policy.joins
    if not scenario.num_failures and not (shares and result.counts.out_of_memory):
        assert result.counts.retries == 0, "only a batch that had no room is taken apart"
    check_what_the_scheduler_heard(scenario, watched.events)


def check_what_the_scheduler_heard(scenario: Scenario, events: list[ev.Event]) -> None:
    """Each plan is reported at most once, and the weights that workers are said to hold fit them (what left for an
    activation is reported with the next load)."""
    reports = Counter(e.plan_id for e in events if isinstance(e, ev.StageFinished | ev.PlanStopped | ev.PlanFailed))
    assert set(reports.values()) <= {1}
    if scenario.switch_every_s is not None:
        return  # what a worker comes back with is its placement of that moment
    resident: dict[str, set[Replica]] = {}
    for event in events:
        if isinstance(event, ev.WorkerJoined):
            resident[event.worker.worker_id] = set(scenario.placement.replicas[event.worker.worker_id])
        elif isinstance(event, ev.ReplicaLoaded):
            held = resident[event.worker_id]
            assert held.issuperset(event.evicted)
            held.difference_update(event.evicted)
            held.add(event.loaded)
            assert 10 * len(held) + 16 <= scenario.memory_bytes


def test_a_violation_is_seen() -> None:
    scenario = everything(5)
    result = scenario.run()
    assert find_violations(result, scenario.workers) == []
    plan = next(plan for plan in result.plans if plan.spans)
    request = next(request for request in result.requests if request.outcome == "finished")

    def problems(**changes: object) -> str:
        return " ".join(find_violations(dataclasses.replace(result, **changes), scenario.workers))  # type: ignore[arg-type]

    twice = [*result.plans, dataclasses.replace(plan, plan_id=10**6)]
    assert "before the end of plan" in problems(plans=twice)
    late = [dataclasses.replace(plan, plan_id=0, start_s=10**6, end_s=10**6, spans=())]
    assert "ran plan 0 after plan" in problems(plans=[*result.plans, *late])
    assert "bytes of 51" in problems(plans=[dataclasses.replace(plan, used_bytes=(52,))])
    assert "crosses nodes" in problems(plans=[dataclasses.replace(plan, workers=("n0/w0", "n1/w0"))])
    assert "out of order" in problems(plans=[dataclasses.replace(plan, end_s=plan.start_s - 1)])
    assert "has not ended" in problems(requests=[dataclasses.replace(request, outcome="unfinished", end_s=None)])
    assert "steps" in problems(requests=[dataclasses.replace(request, timeline=request.timeline[:1])])
    assert "overlap" in problems(requests=[dataclasses.replace(request, arrival_s=request.start_s + 0.1)])  # type: ignore[operator]
    assert "before it arrived" in problems(requests=[dataclasses.replace(request, end_s=request.arrival_s - 1)])
    assert "more GPU-seconds" in problems(busy_seconds={Stage.DIFFUSE: 1e9})


def test_all_that_can_happen_does_happen() -> None:
    counts = [everything(seed).run().counts for seed in range(5)]
    counted = ("yields", "retries", "switches", "loads", "transfers", "worker_losses", "groups_made")
    for name in (*counted, "checkpoints", "resumed_steps"):
        assert sum(getattr(count, name) for count in counts) > 0, name
    assert counts[0].methods.keys() == {"greedy"}


def test_plans_are_sent_ahead_in_all_ways() -> None:
    """D of those that go on and C of those that end, and others join what was to go on."""
    stages, lines = set(), set()
    for seed in range(12):
        policy = Greedy(degree=2, batch=3, preempts=seed % 2 == 0, joins=True, goes_on=True)
        scenario = Scenario(seed, policy, num_nodes=1, num_failures=2, num_cancelled=4)
        watched = Watched(scenario.scheduler())
        assert find_violations(scenario.run(wrapped=watched), scenario.workers) == []
        for plan in watched.plans:
            if inputs := {member.input_id for member in plan.members if member.inherited}:
                stages.add(plan.stages[0])
                lines.add(len(inputs))
        ledger = watched.scheduler._ledger
        assert not ledger.runs
        assert not ledger.requests
        assert not ledger._plans
    assert stages == set(Stage)
    assert lines == {1, 2}


def test_one_seed_has_one_decision_log(tmp_path: Path) -> None:
    """Byte for byte, also in processes with other hash seeds."""
    logs = []
    for hash_seed in range(4):
        path = tmp_path / f"{hash_seed}.jsonl"
        command = [sys.executable, "-m", "tests.engine.simulated.scenario", "7", str(path)]
        output_of(command, ROOT, {**os.environ, "PYTHONHASHSEED": str(hash_seed)})
        logs.append(path.read_bytes())
    for i in range(6):
        everything(7).run(tmp_path / f"again-{i}.jsonl")
        logs.append((tmp_path / f"again-{i}.jsonl").read_bytes())
    assert len(set(logs)) == 1
    everything(8).run(tmp_path / "other.jsonl")
    assert (tmp_path / "other.jsonl").read_bytes() != logs[0]


def test_a_simulated_log_is_replayed_to_the_same_effects(tmp_path: Path) -> None:
    """A fresh scheduler decides the same, from the log alone, which has all ticks."""
    scenario = everything(3)
    result = scenario.run(tmp_path / "log.jsonl")
    logged = read_log(tmp_path / "log.jsonl")
    assert len(logged) > 100
    assert sum(isinstance(decision.event, ev.Tick) for decision in logged) == result.counts.ticks > 0
    assert [decision.now_s for decision in logged] == sorted(decision.now_s for decision in logged)
    for decision, effects in replay(logged, scenario.scheduler()):
        assert effects == decision.effects


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_attainment_and_shares_add_up(jitter: float) -> None:
    result: SimulationResult = Scenario(11, Greedy(degree=4), jitter=jitter).run()
    met = [
        r for r in result.requests if r.end_s is not None and r.slo_s is not None and r.end_s - r.arrival_s <= r.slo_s
    ]
    assert result.attainment == len(met) / 30
    assert sum(result.virtual_replica_shares.values()) == pytest.approx(1.0)
    busy = sum((span.end_s - span.start_s) * (len(plan.workers) if span.stage is Stage.DIFFUSE else 1)
               for plan in result.plans for span in plan.spans)  # fmt: skip
    assert sum(result.busy_seconds.values()) == pytest.approx(busy)
    assert 0 < result.utilisation < 1
