"""The time in which workers become one group: from asking for its process group to the first collective."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

from lib.bench.figures import summarize_ms
from lib.bench.workers import Workers


async def measure_regroup(workers: Workers, sizes: Sequence[int], runs: int) -> dict[str, Any]:
    """Measure, by number of members: `new`, a group that no member has; `kept`, one that all hold (the slowest member
    counts); `kept_over_new`, the ratio of their medians."""
    result: dict[str, Any] = {}
    uses = iter(range(1, 1_000_000))
    for size in sizes:
        members = [f"w{index}" for index in range(size)]

        async def regroup(name: str, members: list[str] = members) -> float:
            use = next(uses)
            seconds = await asyncio.gather(*(workers.call(w, "regroup", name, members, use) for w in members))
            return float(max(seconds))

        new = [await regroup(f"new-{size}-{run}") for run in range(runs)]
        await regroup(f"kept-{size}")
        kept = [await regroup(f"kept-{size}") for _ in range(runs)]
        ratio = round(statistics.median(kept) / statistics.median(new), 4)
        result[str(size)] = {"new": summarize_ms(new), "kept": summarize_ms(kept), "kept_over_new": ratio}
    return result
