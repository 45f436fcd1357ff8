"""Denoising states copied to another worker while they run: a killed worker costs the steps since the last copy."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.live import recovery
from tests.engine.live.configs import worker_configs
from tests.support.decision_log import read_log
from tests.support.waiting import until
from tridentserve.engine.live.engine import LiveEngine
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.spawning.spawner import ActorSpawner
from tridentserve.engine.live.updates import CompletedUpdate, ProgressUpdate, Update
from tridentserve.engine.options import EngineOptions
from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions, WorkerFailure
from tridentserve.parallel import connect_store
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import replay
from tridentserve.stages import Stage
from tridentserve.testing import MODEL, FixedTimes

MEMORY_BYTES = 1 << 30
INPUTS = GenerationInputs("a lighthouse at dawn", Shape(128, 160), recovery.STEPS, 3.5, seed=3)


def spec_of(name: str) -> RequestSpec:
    return RequestSpec(name, MODEL, INPUTS.shape, recovery.STEPS, slo_s=1000.0)


def test_requests_on_simulated_workers_resume_from_the_checkpoint(tmp_path: Path) -> None:
    """E takes half a second, a step one, and the way to the other node two: E's and D's part of the state."""
    log = tmp_path / "decisions.jsonl"
    failures = (WorkerFailure(47.0, "w0", 20.0), WorkerFailure(542.4, "w0", 20.0))
    options = SimulationOptions(
        failures=failures, decision_log=log, keep_plans=True, handoff_capacity_bytes=16, group_bytes=0
    )
    specs = recovery.specs_of(100)
    engine = SimulatedEngine(recovery.scheduler(100), specs, recovery.placement(), FixedTimes(), options)
    result = engine.run([(0.0, spec_of("r-1")), (500.0, spec_of("r-2"))])
    assert recovery.check(read_log(log), "r-1", degree=1) == 40
    assert recovery.check(read_log(log), "r-2", degree=2) == 20, "the copy of step 40 was on its way"
    first, second = result.requests
    # 7 s of work after the copy are lost, and the state comes from the other node.
    assert first.latency_s == pytest.approx(47.0 + 2.0 + 80.0 + 2.0)
    assert [run.steps for run in first.timeline] == [None, 40, 80, None]
    assert second.latency_s == pytest.approx(42.4 + 50.0 + 2.0), "its leader has the copy itself"
    assert engine._cell._handoff.kept == 0
    assert result.counts.resumed_steps == 60


@dataclass
class Service:
    engine: LiveEngine
    log: Path
    steps_seen: list[int]

    async def generate(self, name: str) -> Update | None:
        self.steps_seen.clear()
        update: Update | None = None
        async for update in self.engine.generate(spec_of(name), INPUTS):
            if isinstance(update, ProgressUpdate):
                self.steps_seen.append(update.step)
        return update

    async def holds_nothing(self) -> bool:
        """No worker holds any parcel."""
        handles = self.engine._fleet.list_handles(self.engine.list_live_workers())
        return not any(await asyncio.gather(*(handle.count_parcels() for handle in handles)))

    def leader(self, after: int) -> str:
        """The leader of the first plan given out since then."""
        effects = (effect for decision in read_log(self.log)[after:] for effect in decision.effects)
        return next(effect.plan.leader for effect in effects if isinstance(effect, ev.RunPlan))

    def saved(self, after: int) -> int:
        return sum(isinstance(decision.event, ev.CheckpointSaved) for decision in read_log(self.log)[after:])


@pytest.fixture(scope="module")
async def service(
    ray_cluster: None, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Service]:
    store = connect_store(is_server=True)
    specs, sources = recovery.specs_of(MEMORY_BYTES), {MODEL: ModelSource(MODEL, ensure_tiny("flux", tiny_cache))}
    configs = worker_configs(specs, recovery.placement(), sources, store.port, tiny_cache)
    log = tmp_path_factory.mktemp("checkpoints") / "decisions.jsonl"
    engine = LiveEngine(
        recovery.scheduler(MEMORY_BYTES),
        configs,
        ActorSpawner(0.1),
        lambda group, rank, plan_id: None,
        EngineOptions(decision_log=log),
    )
    await engine.start()
    yield Service(engine, log, [])
    await engine.stop()
    del store


@pytest.fixture(scope="module")
def undisturbed(tiny_cache: Path) -> np.ndarray[Any, Any]:
    torch.set_num_threads(1)
    adapter = load_adapter(ensure_tiny("flux", tiny_cache), frozenset(Stage))
    state = adapter.step(adapter.prepare(adapter.encode(INPUTS), INPUTS), recovery.STEPS)
    (image,) = adapter.decode(adapter.latents(state), INPUTS)
    return np.asarray(image)


@pytest.mark.parametrize("degree", [1, 2])
async def test_a_killed_worker_costs_the_steps_since_the_last_copy(
    service: Service, undisturbed: np.ndarray[Any, Any], degree: int
) -> None:
    before = len(read_log(service.log)) if service.log.exists() else 0
    answering = asyncio.create_task(service.generate(f"r-{degree}"))
    await until(lambda: service.saved(before) == 2)
    service.engine._fleet.get_handle(service.leader(before)).kill()
    answer = await answering
    assert isinstance(answer, CompletedUpdate), answer
    saved = recovery.check(read_log(service.log)[before:], f"r-{degree}", degree)
    (png,) = answer.outputs
    difference = np.abs(np.asarray(Image.open(io.BytesIO(png))).astype(int) - undisturbed.astype(int)).max()
    assert difference <= (0 if degree == 1 else 1)
    after = len(service.steps_seen) - (recovery.STEPS - saved)
    assert service.steps_seen == [*range(1, after + 1), *range(saved + 1, recovery.STEPS + 1)]
    await until(service.holds_nothing)  # Drops at the end are reported, not waited for.
    decisions = read_log(service.log)
    assert {decision.event.kind for decision in decisions} >= {"state_saved", "worker_lost", "plan_failed"}
    for logged, effects in replay(decisions, recovery.scheduler(MEMORY_BYTES)):
        assert effects == logged.effects
