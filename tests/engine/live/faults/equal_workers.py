"""An engine with real workers that all hold a tiny FLUX, for tests of what happens to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.engine.live.configs import worker_configs
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.engine import LiveEngine
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.spawning.spawner import ActorSpawner
from tridentserve.engine.options import EngineOptions
from tridentserve.parallel import abandon, connect_store
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.protocols import Dispatcher
from tridentserve.scheduling.scheduler import Scheduler, SchedulerOptions
from tridentserve.stages import Stage
from tridentserve.testing import MODEL, FixedTimes


@asynccontextmanager
async def run_engine(
    workers: Sequence[str], dispatcher: Dispatcher, tiny_cache: Path, decision_log: Path, **changes: Any
) -> AsyncIterator[LiveEngine]:
    """`changes`: further options of the workers. States are not saved on others."""
    store = connect_store(is_server=True)
    specs = [WorkerSpec(worker_id, "node", 1 << 30) for worker_id in workers]
    placement = PlacementPlan({worker_id: frozenset(Replica(MODEL, stage) for stage in Stage) for worker_id in workers})
    sources = {MODEL: ModelSource(MODEL, ensure_tiny("flux", tiny_cache))}
    engine = LiveEngine(
        Scheduler(specs, placement, FixedTimes(), dispatcher, SchedulerOptions(checkpoint_s=0.0)),
        worker_configs(specs, placement, sources, store.port, tiny_cache, **changes),
        ActorSpawner(0.1),
        partial(abandon, store),
        EngineOptions(decision_log=decision_log),
    )
    await engine.start()
    yield engine
    await engine.stop()
