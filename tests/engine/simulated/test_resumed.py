"""Logs that are followed for a while and simulated from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.simulated.greedy import Greedy
from tests.engine.simulated.scenario import Scenario
from tests.support.decision_log import read_log
from tridentserve.engine.simulated import SimulationOptions
from tridentserve.engine.simulated.resumed import ResumedEnd, ResumedSimulation
from tridentserve.engine.simulated.workers.actual_times import TimeFactors
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry
from tridentserve.scheduling.explanation.chronicle import Chronicle
from tridentserve.scheduling.explanation.durations import measure_durations
from tridentserve.testing import FixedTimes

OVERHEAD_S = 0.05


class Logged:
    """A scenario that has run, with its log."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        scenario.run(folder / "log.jsonl")
        self.entries = read_log(folder / "log.jsonl")
        self.chronicle = Chronicle(self.entries, scenario.placement)
        self.durations = measure_durations(self.chronicle, FixedTimes())

    def resume(self, request_id: str, until_s: float, without: frozenset[str] = frozenset()) -> ResumedEnd:
        scenario, durations = self.scenario, self.durations
        options = SimulationOptions(
            plan_overhead_s=durations.start_s,
            report_overhead_s=durations.report_s,
            image_s_per_pixel=durations.image_s_per_pixel,
            group_setup_s=0.1,
            handoff_capacity_bytes=16,
            group_bytes=0,
        )
        factors = TimeFactors(durations.get_factor, durations.load_factor)
        simulation = ResumedSimulation(
            scenario.scheduler(), scenario.workers, scenario.placement, FixedTimes(), options, factors
        )
        return simulation.run(self.entries, request_id, until_s, without=without)


@pytest.mark.parametrize("seed", range(2))
def test_without_a_change_every_request_ends_as_in_the_log(seed: int, tmp_path: Path) -> None:
    """Whenever the simulation takes over: with plans under way, requests in the queue, weights being loaded; in every
    second scenario workers are lost and come back, too."""
    policy = Greedy(degree=2, batch=2, segment=3, preempts=True, joins=True, goes_on=True)
    failing = seed % 2
    scenario = Scenario(
        seed,
        policy,
        num_requests=20,
        overhead_s=OVERHEAD_S,
        switch_every_s=7.0,
        memory_bytes=51,
        jitter=0.3,
        num_failures=3 * failing,
        checkpoint_s=1.0 * failing,
    )
    logged = Logged(scenario, tmp_path)
    assert logged.durations.report_s == pytest.approx(OVERHEAD_S)
    lives = list(logged.chronicle.lives.values())
    assert len(lives) == 20
    for life in lives[::3]:
        assert life.end_s is not None
        for until_s in (life.arrival_s, life.arrival_s - 5.0, (life.arrival_s + life.end_s) / 2):
            end = logged.resume(life.request_id, until_s)
            assert end.end_s == pytest.approx(life.end_s)
            assert end.outcome == life.outcome
            assert end.took_over_s <= max(0.0, until_s)


def test_requests_that_do_not_come_leave_their_workers_to_others(tmp_path: Path) -> None:
    logged = Logged(Scenario(3, Greedy(), num_nodes=1, num_requests=12), tmp_path)
    *before, last = logged.chronicle.lives.values()
    alone = logged.resume(last.request_id, 0.0, without=frozenset(life.request_id for life in before))
    assert alone.end_s is not None
    assert last.end_s is not None
    assert alone.end_s < last.end_s
    only = logged.resume(before[0].request_id, 0.0, without=frozenset({before[0].request_id}))
    assert (only.end_s, only.outcome) == (None, "unfinished")


def test_a_log_is_not_followed_further_than_the_scheduler_decides_the_same(tmp_path: Path) -> None:
    """The rest is simulated, and the request ends all the same."""
    logged = Logged(Scenario(1, Greedy(), num_requests=12), tmp_path)
    last = list(logged.chronicle.lives.values())[-1]
    scenario = logged.scenario
    scenario.policy = Greedy(segment=1)
    end = logged.resume(last.request_id, last.arrival_s)
    assert end.outcome == "finished"
    assert end.took_over_s < last.arrival_s - 1.0


def test_a_log_that_begins_in_the_middle_is_followed_by_other_plan_ids(tmp_path: Path) -> None:
    logged = Logged(Scenario(1, Greedy(), num_requests=12), tmp_path)
    shifted = [_shift_ids(entry, 1000) for entry in logged.entries]
    last = list(logged.chronicle.lives.values())[-1]
    logged.entries = shifted
    end = logged.resume(last.request_id, last.arrival_s)
    assert end.end_s == pytest.approx(last.end_s)
    assert last.arrival_s - 1.0 < end.took_over_s


def _shift_ids(entry: LogEntry, by: int) -> LogEntry:
    """The entry with other plan ids."""
    event = entry.event
    effects: list[ev.Effect] = []
    if isinstance(event, ev.StageFinished | ev.PlanFailed | ev.PlanStopped | ev.CheckpointSaved):
        event = replace(event, plan_id=event.plan_id + by)
    for effect in entry.effects:
        if isinstance(effect, ev.RunPlan):
            effects.append(replace(effect, plan=replace(effect.plan, plan_id=effect.plan.plan_id + by)))
        else:
            effects.append(effect)
    return LogEntry(entry.now_s, event, effects)
