"""A small service, simulated under bursts, with its decision log."""

from __future__ import annotations

import random
from collections.abc import Collection
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from deployments.assembly.profiles import make_cost_model
from deployments.assembly.simulation import simulate_service
from deployments.config.app import AppArgs
from tests.support.decision_log import read_log
from tests.support.tables.steady_times import STEADY_TIMES
from tridentserve.engine.simulated import SimulationOptions, SimulationResult, TimedRequest
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.decision_log import LogEntry

CONFIGURATION = {
    "models": [{"name": "tiny-sd3", "tiny": "sd3"}],
    "profiles": [STEADY_TIMES],
    "cluster": {"workers_per_node": 4, "memory_mb": 1024},
    "placement": ["EDC", "EDC", "DC", "E"],
}
ARGS = AppArgs.model_validate(CONFIGURATION)


@cache
def record_bursts(num_bursts: int = 1) -> tuple[LogEntry, ...]:
    """The log of bursts, with stages that take other times than by the profile. Over ten requests of one are late."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        simulate_bursts(log=path, num_bursts=num_bursts)
        return tuple(read_log(path))


def simulate_bursts(without: Collection[str] = (), log: Path | None = None, num_bursts: int = 1) -> SimulationResult:
    """All of it, but for some requests: what would really have happened without them."""
    options = SimulationOptions(jitter=0.2, plan_overhead_s=0.003, report_overhead_s=0.004, decision_log=log)
    arrivals = [(at_s, spec) for at_s, spec in _list_arrivals(num_bursts) if spec.request_id not in without]
    return simulate_service(ARGS, make_cost_model(ARGS), make_cost_model(ARGS), arrivals, options)


def _list_arrivals(num_bursts: int) -> list[TimedRequest]:
    draw = random.Random(7)
    arrivals, at_s = [], 0.0
    for burst in range(num_bursts):
        for number in range(25):
            at_s += draw.expovariate(25.0)
            side = draw.choice((256, 256, 512))
            spec = RequestSpec(f"b{burst}r{number}", "tiny-sd3", Shape(side, side), draw.choice((10, 20, 30)))
            arrivals.append((at_s, spec))
        at_s += 60.0
    return arrivals
