"""A worker whose process stands still, as no system ends it: its plan ends, and its request goes on elsewhere."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.engine.live.faults.equal_workers import run_engine
from tests.support.decision_log import read_log
from tests.support.waiting import until
from tridentserve.engine.live import fleet
from tridentserve.engine.live.engine import LiveEngine
from tridentserve.engine.live.updates import CompletedUpdate, ProgressUpdate, Update
from tridentserve.engine.options import WorkerOptions
from tridentserve.protocols import Assignment, ClusterView, Decisions, WorkerView
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.scheduling import events as ev
from tridentserve.stages import PlacementType
from tridentserve.testing import MODEL

WORKERS, STEPS, HANG_TIMEOUT_S = ("w0", "w1", "w2"), 60, 5.0
INPUTS = GenerationInputs("a lighthouse at dawn", Shape(128, 160), STEPS, 3.5, seed=3)


class Pairs:
    """Each request on the first two idle workers."""

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return None

    def decide(self, view: ClusterView) -> Decisions:
        pair = tuple(sorted(worker.worker_id for worker in view.workers if worker.idle))[:2]
        names = [request.spec.request_id for request in view.pending]
        if not names or len(pair) < 2:
            return Decisions()
        one = Assignment((names[0],), PlacementType.EDC, pair[:1], pair, pair[:1], view.now_s, "scene")
        return Decisions([one])


@pytest.fixture
async def engine(
    ray_cluster: None, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LiveEngine]:
    monkeypatch.setattr(fleet, "SILENCE_S", 5.0)
    log = tmp_path / "decisions.jsonl"
    async with run_engine(WORKERS, Pairs(), tiny_cache, log, hang_timeout_s=HANG_TIMEOUT_S) as engine:
        yield engine


@pytest.mark.parametrize("hanging", [pytest.param("w0", id="leader", marks=pytest.mark.slow), "w1"])
async def test_its_plan_fails_and_the_request_runs_elsewhere(engine: LiveEngine, tmp_path: Path, hanging: str) -> None:
    handle = engine._fleet.get_handle(hanging)
    process_id = await handle.actor.__ray_call__.remote(lambda worker: os.getpid())
    update: Update | None = None
    is_stopped = False
    async for update in engine.generate(RequestSpec("r", MODEL, INPUTS.shape, STEPS, slo_s=1000.0), INPUTS):
        if isinstance(update, ProgressUpdate) and update.step > 3 and not is_stopped:
            is_stopped = True
            os.kill(process_id, signal.SIGSTOP)
    assert isinstance(update, CompletedUpdate), update
    events = [decision.event for decision in read_log(tmp_path / "decisions.jsonl")]
    failed, *_ = [event for event in events if isinstance(event, ev.PlanFailed)]
    waited_ms = re.search(r"Timed out waiting (\d+)ms", failed.error)
    assert waited_ms is not None, failed.error
    assert HANG_TIMEOUT_S * 1000 <= int(waited_ms[1]) < WorkerOptions().group_timeout_s * 1000
    assert [event.worker_id for event in events if isinstance(event, ev.WorkerLost)] == [hanging]
    await until(lambda: not Path(f"/proc/{process_id}").exists())
