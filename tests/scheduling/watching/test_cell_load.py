"""The summary of a scheduler's load: work that was given out, and work that waits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.simulated.greedy import Greedy
from tridentserve.cells.summary import CellModelLoad
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.protocols import PendingRequest, WorkerView
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.scheduling.watching.cell_load import summarize_load
from tridentserve.stages import Stage
from tridentserve.testing import MODEL, FixedTimes, make_cluster, make_request

TIMES = FixedTimes()
REQUEST_S = 0.5 + 4.0 + 2.0  # GPU-seconds of four steps


def worker(name: str, models: str, free_at_s: float = 0.0) -> WorkerView:
    held = frozenset(Replica(model, Stage.DIFFUSE) for model in models)
    return WorkerView(name, "n0", 100, held, idle=free_at_s == 0.0, free_at_s=free_at_s)


def waiting(model: str, steps_done: int = 0) -> PendingRequest:
    return PendingRequest(RequestSpec("r", model, Shape(512, 512), 4), 0.0, 10.0, steps_done)


def approximate(num_workers: int, num_idle: int, work_s: float) -> CellModelLoad:
    close: Any = pytest.approx(work_s)
    return CellModelLoad(num_workers, num_idle, close)


def test_what_waits_is_shared_by_the_workers_of_its_model() -> None:
    workers = [worker("a", "x", 13.0), worker("b", "x"), worker("c", "xy", 11.0), worker("d", "y"), worker("e", "")]
    found = summarize_load(workers, [waiting("x"), waiting("y", steps_done=2), waiting("gone")], TIMES, now_s=10.0)
    x_s, y_s = REQUEST_S / 3, REQUEST_S / 2 / 2
    assert set(found.models) == {"x", "y"}
    assert found.models["x"] == approximate(3, 1, ((3 + x_s) + x_s + (1 + x_s + y_s)) / 3)
    assert found.models["y"] == approximate(2, 1, ((1 + x_s + y_s) + y_s) / 2)


def test_a_scheduler_counts_live_workers_what_runs_and_what_waits() -> None:
    workers, placement = make_cluster({"a": "EDC", "b": "EDC"})
    scheduler = Scheduler(workers, placement, TIMES, Greedy(degree=1))
    assert scheduler.summarize_load(0.0).models == {}
    for spec in workers:
        scheduler.on(ev.WorkerJoined(spec), 0.0)
    assert scheduler.summarize_load(0.0).models == {MODEL: CellModelLoad(2, 2, 0.0)}
    for name in "rst":
        scheduler.on(ev.RequestArrived(make_request(name)), 0.0)
    assert scheduler.summarize_load(0.0).models == {MODEL: CellModelLoad(2, 2, 3 * REQUEST_S / 2)}
    scheduler.on(ev.Tick(), 0.0)
    assert scheduler.summarize_load(1.0).models == {MODEL: CellModelLoad(2, 0, (2 * (REQUEST_S - 1) + REQUEST_S) / 2)}
    scheduler.on(ev.WorkerLost("b", "gone"), 1.0)
    assert scheduler.summarize_load(1.0).models[MODEL].num_workers == 1


def test_a_model_that_only_lost_workers_hold_has_no_entry() -> None:
    workers, placement = make_cluster({"a": "EDC"})
    scheduler = Scheduler(workers, PlacementPlan(placement.replicas), TIMES, Greedy())
    scheduler.on(ev.WorkerJoined(workers[0]), 0.0)
    scheduler.on(ev.WorkerLost("a", "gone"), 0.0)
    assert scheduler.summarize_load(0.0).models == {}
