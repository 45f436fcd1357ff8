"""Measures the time in which a worker gets the weights of D: from the model folder, the host copy, or a peer."""

from __future__ import annotations

import asyncio
import os
import statistics
from typing import Any

from lib.bench.figures import compute_median_ms
from lib.bench.workers import Workers
from tridentserve.engine.options import Fetch
from tridentserve.plans import Replica
from tridentserve.stages import Stage

_WAYS: tuple[Fetch, ...] = ("host", "peer", "mapped")


async def measure_load(workers: Workers, model: str, runs: int) -> dict[str, Any]:
    """Medians by source; the structure of the models exists already, as on a worker that has held them before, but for
    `disk`, which is all that a worker does without a host copy. Files are in the page cache: a cold disk is slower."""
    replica = Replica(model, Stage.DIFFUSE)
    await asyncio.to_thread(os.sync)
    disk = [await workers.call("w0", "read_model_folder", replica) for _ in range(runs)]
    # The peer, with a copy in memory of its own.
    await workers.call("w1", "set_fetch", "host")
    await workers.call("w1", "load", replica)
    # The host copy has just been made; writing it to a slow disk would stall the loads.
    await asyncio.to_thread(os.sync)
    result: dict[str, Any] = {}
    for fetch in _WAYS:
        await workers.call("w0", "set_fetch", fetch)
        loads = [await workers.call("w0", "load", replica) for _ in range(1 + runs)][1:]
        sources = {source for source, _, _ in loads}
        if sources != {"peer" if fetch == "peer" else "host"}:
            raise RuntimeError(f"loads that should come from {fetch} came from {sources}")
        result[f"{fetch}_ms"] = compute_median_ms([seconds for _, seconds, _ in loads])
        result["nbytes"] = loads[0][2]
    result["disk_ms"] = compute_median_ms(disk)
    result["disk_range_ms"] = [round(1000 * min(disk), 3), round(1000 * max(disk), 3)]
    for name in ("host", "peer"):
        result[f"{name}_speedup"] = round(1000 * statistics.median(disk) / result[f"{name}_ms"], 2)
    return result
