"""64 MiB from one worker to another: through the handoff buffer (NIXL), and through Ray's object store."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from lib.bench.figures import compute_median_ms
from lib.bench.workers import Workers
from tridentserve.engine.live.handoff.peer import HandoffKey

NBYTES = 64 << 20


async def measure_handoff(workers: Workers, runs: int, overlap_s: float) -> dict[str, Any]:
    """All ways end with a tensor that the consumer owns. `nixl_take_ms`: the part that a consumer waits for when the
    parcel was pushed before it asked. `object_store_ms`: a torch tensor is put and got; `object_store_numpy_ms`: a
    numpy array, which Ray maps, and a copy of it. `overlap`: matrix products that the consumer does while parcels
    arrive for `overlap_s`, over those it does when nothing happens."""
    samples: dict[str, list[float]] = {"nixl": [], "nixl_take": [], "object_store": [], "object_store_numpy": []}
    for run in range(-1, runs):  # the first makes the connection, or the store's pages
        whole_s, take_s = await _measure_nixl(workers, run)
        measured = {"nixl": whole_s, "nixl_take": take_s}
        measured |= {"object_store": await _measure_object_store(workers, True)}
        measured |= {"object_store_numpy": await _measure_object_store(workers, False)}
        if run >= 0:
            for name, seconds in measured.items():
                samples[name].append(seconds)
    result: dict[str, Any] = {"nbytes": NBYTES}
    for name, of_name in samples.items():
        result[f"{name}_ms"] = compute_median_ms(of_name)
        result[f"{name}_range_ms"] = [round(1000 * min(of_name), 3), round(1000 * max(of_name), 3)]
    for name in ("object_store", "object_store_numpy"):
        result[f"speedup_over_{name}"] = round(result[f"{name}_ms"] / result["nixl_ms"], 2)
    idle, busy, moved = await _measure_overlap(workers, overlap_s)
    return result | {"overlap": {"compute_kept": round(busy / idle, 3), "parcels_meanwhile": moved}}


async def _measure_nixl(workers: Workers, run: int) -> tuple[float, float]:
    """Seconds of a handoff, and of its end at the consumer."""
    key = HandoffKey("handoff", 1_000_000 + run)
    await workers.call("w0", "keep", key, NBYTES)
    start_s = time.perf_counter()
    await workers.call("w0", "push", key, "w1")
    pushed_s = time.perf_counter()
    taken = await workers.call("w1", "take", key, "w0")
    end_s = time.perf_counter()
    if taken != NBYTES:
        raise RuntimeError(f"{taken} bytes arrived, {NBYTES} were sent")
    await workers.forget(["handoff"], key.plan_id)
    return end_s - start_s, end_s - pushed_s


async def _measure_object_store(workers: Workers, as_tensor: bool) -> float:
    await workers.call("w0", "make", NBYTES)
    start_s = time.perf_counter()
    references = await workers.call("w0", "put", as_tensor)
    await workers.call("w1", "get", references)
    return time.perf_counter() - start_s


async def _measure_overlap(workers: Workers, seconds: float) -> tuple[int, int, int]:
    """Products of `w1` in that time when idle and while parcels come in from `w0`, and how many parcels came."""
    idle = await workers.call("w1", "compute", seconds)
    computing = asyncio.ensure_future(workers.call("w1", "compute", seconds))
    moved = 0
    while not computing.done():
        await _measure_nixl(workers, 10_000 + moved)
        moved += 1
    return idle, await computing, moved
