"""The loop around the scheduler: ticks, retries, the time that a solve takes, the decision log, the end."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.engine.simulated.scripted import Script, run, simulate, spans
from tests.support.decision_log import read_log
from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions
from tridentserve.errors import ConfigError, TridentServeError
from tridentserve.scheduling import events as ev
from tridentserve.testing import FixedTimes, make_cluster, make_request


class Ticking(Script):
    """Decides in ticks: a plan of one second for each request, on its own worker; notes when it is asked."""

    def __init__(self, patience_s: float = 0.0) -> None:
        super().__init__({})
        self.patience_s = patience_s
        self.ticks: list[float] = []
        self.waiting: list[tuple[float, str]] = []

    def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        if isinstance(event, ev.RequestArrived):
            self.waiting.append((now_s, event.spec.request_id))
        elif isinstance(event, ev.Tick):
            self.ticks.append(now_s)
            due = [name for since_s, name in self.waiting if now_s >= since_s + self.patience_s]
            self.waiting = [(since_s, name) for since_s, name in self.waiting if name not in due]
            for name in due:
                effect = run(len(self.plans) + 1, "C", name, name)
                self.plans[effect.plan.plan_id] = effect.plan
                effects.append(effect)
        self.num_pending = len(self.waiting)
        return [*super().on(event, now_s), *effects]


def test_a_tick_follows_events_but_not_at_once_after_another() -> None:
    script = Ticking()
    simulate(script, {"a": "C", "b": "C", "c": "C"}, {"a": 1.0, "b": 1.0, "c": 1.01}, tick_s=0.05)
    assert script.ticks == pytest.approx([0.0, 1.0, 1.05, 3.0, 3.05])  # joins, a and b, c, and the ends of their C


def test_while_requests_wait_there_are_ticks() -> None:
    script = Ticking(patience_s=1.0)
    result = simulate(script, {"a": "C"}, {"a": 1.0})
    assert script.ticks == pytest.approx([0.0, 1.0, 1.25, 1.5, 1.75, 2.0, 4.0])
    assert result.requests[0].end_s == pytest.approx(4.0)


def test_a_solve_delays_what_it_decides_and_what_comes_meanwhile() -> None:
    script = Ticking()
    result = simulate(script, {"a": "C", "b": "C"}, {"a": 1.0, "b": 1.1}, solve_time=0.3, tick_s=0.05)
    # The tick at 1.0 ends at 1.3; b, which came at 1.1, is taken in then, and its tick comes 0.05 s later.
    assert [at_s for at_s in script.ticks if at_s < 2] == pytest.approx([0.0, 1.0, 1.35])
    assert [event[0] for event in script.of(ev.RequestArrived)] == [1.0, 1.1]
    assert spans(result) == {1: [("C", 1.3, 3.3)], 2: [("C", pytest.approx(1.65), pytest.approx(3.65))]}
    assert result.counts.ticks == len(script.ticks)


def test_reports_wait_for_a_solve_too() -> None:
    script = Ticking()
    result = simulate(script, {"a": "C", "b": "C"}, {"a": 1.0, "b": 3.0}, solve_time=0.5)
    # The C of a ends at 3.5, when the solve for b does: nobody waits. With b at 2.9 it would be half a second later.
    assert result.requests[0].end_s == 3.5
    later = simulate(Ticking(), {"a": "C", "b": "C"}, {"a": 1.0, "b": 3.2}, solve_time=0.5)
    assert [request.end_s for request in later.requests][:1] == [3.7]


def test_a_measured_solve_takes_its_time() -> None:
    result = simulate(Ticking(), {"a": "C"}, {"a": 1.0}, solve_time="measured")
    (finished,) = result.requests
    assert finished.end_s is not None
    assert 3.0 < finished.end_s < 3.5
    assert result.counts.solve_seconds > 0


def test_the_decision_log_has_events_and_all_ticks_with_their_effects(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    script = Ticking(patience_s=1.0)
    simulate(script, {"a": "C"}, {"a": 1.0}, decision_log=path)
    logged = read_log(path)
    assert [(decision.now_s, decision.event.kind, len(decision.effects)) for decision in logged] == [
        (0.0, "worker_joined", 0), (0.0, "tick", 0), (1.0, "request_arrived", 0), (1.0, "tick", 0), (1.25, "tick", 0),
        (1.5, "tick", 0), (1.75, "tick", 0), (2.0, "tick", 1), (4.0, "stage_finished", 1), (4.0, "tick", 0),
    ]  # fmt: skip


def test_a_request_that_nobody_wants_is_left_unfinished() -> None:
    result = simulate(Ticking(patience_s=1e9), {"a": "C"}, {"a": 5.0}, max_idle_s=10.0)
    assert [request.outcome for request in result.requests] == ["unfinished"]
    assert result.requests[0].end_s is None
    # Every 0.25 s for a second, and then whenever the time has grown by a quarter.
    assert result.counts.ticks == pytest.approx(4 + math.log(10.0, 1.25), abs=3)


def test_a_simulation_can_be_cut_short() -> None:
    result = simulate(Ticking(), {"a": "C", "b": "C"}, {"a": 1.0, "b": 9.0}, end_s=2.5)
    assert [request.outcome for request in result.requests] == ["unfinished"]
    assert (result.plans[0].outcome, result.duration_s, sum(result.busy_seconds.values())) == ("unfinished", 2.5, 1.5)


def test_progress_is_reported() -> None:
    told: list[tuple[float, int]] = []
    arrivals = {"a": 1.0, "b": 2.0}
    simulate(Ticking(), {"a": "C", "b": "C"}, arrivals, on_progress=lambda now_s, ended: told.append((now_s, ended)))
    assert told == [(3.0, 1), (4.0, 2)]


def test_what_is_asked_for_wrongly() -> None:
    specs, placement = make_cluster({"a": "C"})
    engine = SimulatedEngine(Ticking(), specs, placement, FixedTimes())
    with pytest.raises(ConfigError, match=r"request id 'a' comes twice, again at 2\.0 s"):
        engine.run([(1.0, make_request("a")), (2.0, make_request("a"))])
    with pytest.raises(ConfigError, match="runs once"):
        engine.run([])
    for wrong in ({"retry_s": 0.0}, {"tick_s": -1.0}, {"jitter": float("nan")}, {"solve_time": -0.1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SimulationOptions(**wrong)  # type: ignore[arg-type]


def test_a_scheduler_that_ends_a_request_twice_is_reported() -> None:
    script = Script({"a": [ev.Reject("a", "cancelled", "once"), ev.Reject("a", "cancelled", "again")]})
    with pytest.raises(TridentServeError, match="request a has ended twice: again"):
        simulate(script, {"w": "C"}, {"a": 1.0})
