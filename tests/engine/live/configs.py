"""Real workers of a test's own engine, as the Scheduler deployment would configure them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.messages import ModelSource, WorkerConfig
from tridentserve.plans import PlacementPlan


def worker_configs(
    specs: Sequence[WorkerSpec],
    placement: PlacementPlan,
    sources: dict[str, ModelSource],
    store_port: int,
    cache_dir: Path,
    handoff_bytes: int = 4 << 20,
    **others: Any,
) -> list[WorkerConfig]:
    """`others`: further fields, the same for all."""
    return [
        WorkerConfig(
            spec=spec,
            incarnation=0,
            label=placement.describe(spec.worker_id),
            replicas=placement.replicas[spec.worker_id],
            sources=sources,
            store_host="127.0.0.1",
            store_port=store_port,
            handoff_bytes=handoff_bytes,
            host_dir=cache_dir / "host",
            **others,
        )
        for spec in specs
    ]
