"""A simulated service with more requests of several sizes than it can serve one by one: alone, in batches of one size,
and in batches of all sizes where the dispatcher expects that packed steps pay."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from deployments.assembly.options import ServiceOptions
from deployments.assembly.simulation import SimulationSetup, simulate
from dispatch import DispatchOptions
from profiler import CostModel, read_shipped_table
from profiler.cost_model import LARGEST_BATCH
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated import SimulationOptions, SimulationResult, TimedRequest
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.estimation.request_work import estimate_work
from tridentserve.stages import Stage

_MODEL, _STEPS, _WORKERS, _MEMORY_BYTES = "sd3-medium", 20, 4, 48 << 30
# More than workers can serve one by one, so that requests wait that could share steps.
_LOAD = 1.5
_WAYS: Mapping[str, DispatchOptions] = {
    "alone": DispatchOptions(max_batch=1),
    "batches": DispatchOptions(max_batch=LARGEST_BATCH),
    "packed": DispatchOptions(max_batch=LARGEST_BATCH, pack_sizes=(_MODEL,)),
}


def simulate_mix(profiles: str, sides: Sequence[int], requests: int, seed: int) -> list[dict[str, Any]]:
    """Serve the same requests in each way. `profiles`: the name of a shipped table."""
    table = read_shipped_table(profiles)
    (device,) = {row.gpu for row in table.rows}
    make_times = partial(CostModel, [table], device)
    workers = [WorkerSpec(f"w{number}", "n0", _MEMORY_BYTES, device, number) for number in range(_WORKERS)]
    arrivals = _draw_arrivals(make_times(), sides, requests, seed)
    rows = []
    for way, dispatch in _WAYS.items():
        setup = SimulationSetup(
            workers, make_times, ServiceOptions(dispatch=dispatch), engine=SimulationOptions(keep_plans=True)
        )
        rows.append({"sides": list(sides), "way": way, **_summarize(simulate(arrivals, setup), arrivals)})
    return rows


def _draw_arrivals(times: CostModel, sides: Sequence[int], requests: int, seed: int) -> list[TimedRequest]:
    draw, at_s, arrivals = random.Random(seed), 0.0, []
    shapes = [Shape(side, side) for side in sides]
    works = [estimate_work(times, RequestSpec("", _MODEL, shape, _STEPS)) for shape in shapes]
    rate = _LOAD * _WORKERS / statistics.mean(work.gpu_seconds for work in works)
    for number in range(requests):
        at_s += draw.expovariate(rate)
        arrivals.append((at_s, RequestSpec(f"r{number}", _MODEL, draw.choice(shapes), _STEPS)))
    return arrivals


def _summarize(result: SimulationResult, arrivals: Sequence[TimedRequest]) -> dict[str, Any]:
    shapes = {spec.request_id: spec.shape for _, spec in arrivals}
    plans = [plan for plan in result.plans if any(span.stage is Stage.DIFFUSE for span in plan.spans)]
    mixed = sum(len({shapes[name] for name in plan.request_ids}) > 1 for plan in plans)
    return {
        "plans": len(plans),
        "mixed_plans": mixed,
        "on_time": result.attainment,
        "mean_latency_s": statistics.mean(each.latency_s for each in result.requests if each.latency_s is not None),
        "end_s": result.duration_s,
    }
