"""How long a worker takes to get the weights of D: from the checkpoint, the host copy, or a peer."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from lib.bench.figures import median_ms
from lib.bench.workers import started
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.options import Fetch
from tridentserve.plans import Replica
from tridentserve.stages import Stage

_REPLICA = Replica("large", Stage.DIFFUSE)


async def measure_load(source: ModelSource, runs: int) -> dict[str, Any]:
    """Medians by source; the structure of the models exists already, as on a worker that has held them before, but for
    `disk`, which is all that a worker does without a host copy. Files are in the page cache: a cold disk is slower."""
    result: dict[str, Any] = {}
    disk: list[float] = []
    ways: tuple[tuple[str, Fetch], ...] = (("host", "host"), ("peer", "peer"), ("mapped", "mapped"))
    for name, fetch in ways:
        with tempfile.TemporaryDirectory() as folder:
            async with started(2, {"large": source}, Path(folder), fetch=fetch) as workers:
                if fetch == "peer":
                    await workers.call("w1", "load", _REPLICA)
                if fetch == "host":
                    disk = [await workers.call("w0", "read_checkpoint", _REPLICA) for _ in range(runs)]
                loads = [await workers.call("w0", "load", _REPLICA) for _ in range(1 + runs)][1:]
        sources = {source for source, _, _ in loads}
        if sources != {"peer" if fetch == "peer" else "host"}:
            raise RuntimeError(f"loads that should come from {name} came from {sources}")
        result[f"{name}_ms"] = median_ms([seconds for _, seconds, _ in loads])
        result["nbytes"] = loads[0][2]
    result["disk_ms"] = median_ms(disk)
    result["disk_range_ms"] = [round(1000 * min(disk), 3), round(1000 * max(disk), 3)]
    for name in ("host", "peer"):
        result[f"{name}_speedup"] = round(1000 * statistics.median(disk) / result[f"{name}_ms"], 2)
    return result
