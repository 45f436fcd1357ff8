"""Four workers of one node, which run the plans that tests give them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engine.live.fleet.plans import HANDOFF_BYTES, WORKERS, Plans
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.fleet import WorkerFleet
from tridentserve.engine.live.messages import ModelSource, WorkerConfig
from tridentserve.engine.live.spawning.spawner import ActorSpawner
from tridentserve.engine.options import WorkerOptions
from tridentserve.parallel import connect_store
from tridentserve.pipelines.tiny.build import ensure_tiny


@pytest.fixture(scope="module")
async def plans(ray_cluster: None, tiny_cache: Path) -> AsyncIterator[Plans]:
    sources = {name: ModelSource(name, ensure_tiny(name, tiny_cache)) for name in ("sd3", "flux", "flux_kontext")}
    store = connect_store(is_server=True)
    configs = [
        WorkerConfig(
            spec=WorkerSpec(worker_id, "node", 1 << 30),
            incarnation=0,
            label="sd3:EDC",
            replicas=frozenset(),  # loaded when a plan needs them
            sources=sources,
            shares={},
            store_host="127.0.0.1",
            store_port=store.port,
            options=WorkerOptions(handoff_bytes=HANDOFF_BYTES, host_dir=tiny_cache / "host"),
        )
        for worker_id in WORKERS
    ]
    lost: list[str] = []
    fleet = WorkerFleet(configs, ActorSpawner(0.1), lambda config: None, lambda worker_id, why: lost.append(why))
    await fleet.start()
    made = Plans(fleet)
    yield made
    assert not lost
    made.close()
    await fleet.stop()
    del store
