"""The cost of a join and of a leave: a request comes into a running batch of one, and ends before it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lib.bench.figures import compute_median_ms
from lib.bench.service import run_service
from tridentserve.protocols import Assignment, ClusterView, Decisions, Dispatcher, WorkerView
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage

_MODEL = "tiny"
_LONG, _SHORT = 24, 4
# The share of the steps of the long request after which the short one comes.
_COMES_AFTER = 0.3


@dataclass(frozen=True, slots=True)
class _Joins:
    """A dispatcher that lets all that wait join what runs, and those that are left go on when others end."""

    inner: Dispatcher

    def decide(self, view: ClusterView) -> Decisions:
        running = [each for each in view.running if each.stage is not Stage.DECODE]
        waiting = view.pending
        if not running or not waiting:
            return self.inner.decide(view)
        if any(each.yielding or each.stage is not Stage.DIFFUSE for each in running):
            return Decisions()
        names = (*(each.spec.request_id for each in running), *(each.spec.request_id for each in waiting))
        workers = running[0].diffuse
        joined = Assignment(names, PlacementType.EDC, workers, workers, workers, view.now_s, "joins")
        return Decisions([replace(joined, takes_over=True, goes_on=True)])

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return self.inner.can_ever_run(spec, workers)


async def measure_join(folder: Path, host_dir: Path, side: int, runs: int) -> dict[str, Any]:
    """Time in which the only worker of a whole engine does nothing: between the last step of the batch without the
    request that joins and the first thing that is done with it, and after its last step until the others go on, without
    the time in which it is decoded."""
    args: dict[str, Any] = {
        "models": [{"name": _MODEL, "path": str(folder), "profile_as": "tiny-sd3"}],
        "cluster": {"workers_per_node": 1, "memory_mb": 4096},
        "placement": ["EDC"],
        "dispatch": {"policy": "edf", "max_degree": 1},
    }
    long, short = (GenerationInputs("join", Shape(side, side), steps, 5.0, seed=1) for steps in (_LONG, _SHORT))
    joins_s: list[float] = []
    leaves_s: list[float] = []
    async with run_service(args, folder, host_dir, _Joins) as service:
        alone = await service.ask("alone", _MODEL, long)
        denoising_s = sum(ran.seconds for ran in alone.timeline if ran.stage is Stage.DIFFUSE)
        while len(joins_s) < runs:
            name = f"r{len(joins_s)}"
            first = asyncio.create_task(service.ask(f"{name}-long", _MODEL, long))
            await asyncio.sleep(_COMES_AFTER * denoising_s)
            joined = await service.ask(f"{name}-short", _MODEL, short)
            parts = [ran for ran in (await first).timeline if ran.stage is Stage.DIFFUSE]
            encode = next(ran for ran in joined.timeline if ran.stage is Stage.ENCODE)
            joins_s.append(encode.start_s - parts[0].end_s)
            decode = next(ran for ran in joined.timeline if ran.stage is Stage.DECODE)
            leaves_s.append(parts[2].start_s - parts[1].end_s - decode.seconds)
    return {
        "side": side,
        "join_ms": compute_median_ms(joins_s),
        "join_range_ms": _list_range_ms(joins_s),
        "leave_ms": compute_median_ms(leaves_s),
        "leave_range_ms": _list_range_ms(leaves_s),
    }


def _list_range_ms(samples_s: Sequence[float]) -> list[float]:
    return [round(1000 * seconds, 3) for seconds in (min(samples_s), max(samples_s))]
