"""Real workers of a test's own engine, as the service makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployments.assembly import workers
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.messages import ModelSource, WorkerConfig
from tridentserve.engine.options import WorkerOptions
from tridentserve.plans import PlacementPlan


def worker_configs(
    specs: Sequence[WorkerSpec],
    placement: PlacementPlan,
    sources: dict[str, ModelSource],
    store_port: int,
    cache_dir: Path,
    handoff_bytes: int = 4 << 20,
    **changes: Any,
) -> list[WorkerConfig]:
    """`changes`: further options of the workers. All of them may denoise at once, however few cores the machine has."""
    changes = {"max_denoising": len(specs), **changes}
    options = WorkerOptions(handoff_bytes=handoff_bytes, host_dir=cache_dir / "host", **changes)
    return workers.make_worker_configs(specs, placement, sources, {}, ("127.0.0.1", store_port), options)
