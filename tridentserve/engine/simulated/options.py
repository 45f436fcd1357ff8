"""What a simulation can be told, beyond the cluster and the trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tridentserve.errors import ConfigError
from tridentserve.plans import WorkerId
from tridentserve.scheduling.tick_pacer import RETRY_S, TICK_S


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """At `time_s` a worker is lost with all that it holds; `down_s` later it is back, with the replicas of its
    placement resident."""

    time_s: float
    worker_id: WorkerId
    down_s: float


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """All times in seconds of the simulation.

    `tick_s`, `retry_s`: as in the live engine, a tick follows events, at most every `tick_s`; while requests wait,
    there is one every `retry_s` even if nothing happened.
    `solve_time`: what a tick costs: as many seconds as it really took ("measured": runs differ then), or a constant.
    `jitter`: relative standard deviation of stage times (lognormal, mean 1), drawn from `seed` and the request's id:
    policies that are compared meet the same luck.
    `plan_overhead_s`: from when a plan is given out until its workers can start it. `report_overhead_s`: from the end
    of a plan until the scheduler knows of it, with `picture_s_per_pixel` more for each pixel that was decoded, as files
    are made then. `slowdown`: entry n - 1 is how many times as long everything takes while n workers of a node compute
    at once, as CPU workers share cores; empty: workers do not disturb each other. `wide_slowdown`: the same of plans on
    several workers, which wait for each other; empty: as `slowdown`.
    `group_setup_s`: the first use of a process group's name. `handoff_capacity_bytes`: of each worker's buffer; it is
    taken from the worker's memory, and what does not fit waits in the host memory of the worker that made it.
    `group_bytes`: of each worker's memory, for its process groups.
    `max_idle_s`: when nothing has happened for so long, and nothing will, requests that still wait are left unfinished.
    `end_s`: stop here, whatever still runs. `keep_plans`: the result holds every plan and the stages of every request.
    `decodes_in_tiles`: a worker that is short of memory does C so, and E one request after another.
    `on_progress`: called with the time and how many requests have ended, whenever one ends.
    """

    tick_s: float = TICK_S
    retry_s: float = RETRY_S
    solve_time: Literal["measured"] | float = 0.0
    jitter: float = 0.0
    seed: int = 0
    plan_overhead_s: float = 0.0
    report_overhead_s: float = 0.0
    picture_s_per_pixel: float = 0.0
    slowdown: tuple[float, ...] = ()
    wide_slowdown: tuple[float, ...] = ()
    group_setup_s: float = 0.0
    handoff_capacity_bytes: int = 64 * 2**20
    group_bytes: int = 0
    failures: tuple[WorkerFailure, ...] = ()
    max_idle_s: float = 60.0
    end_s: float = math.inf
    keep_plans: bool = False
    decodes_in_tiles: bool = True
    decision_log: Path | None = None
    on_progress: Callable[[float, int], None] | None = None

    def __post_init__(self) -> None:
        constant_s = 0.0 if self.solve_time == "measured" else self.solve_time
        for name, value in (
            ("tick_s", self.tick_s),
            ("solve_time", constant_s),
            ("jitter", self.jitter),
            ("plan_overhead_s", self.plan_overhead_s),
            ("report_overhead_s", self.report_overhead_s),
            ("picture_s_per_pixel", self.picture_s_per_pixel),
            ("group_setup_s", self.group_setup_s),
            ("handoff_capacity_bytes", self.handoff_capacity_bytes),
            ("group_bytes", self.group_bytes),
            ("max_idle_s", self.max_idle_s),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value}; it must be a number from 0 on")
        if not (math.isfinite(self.retry_s) and self.retry_s > 0):
            raise ConfigError(f"retry_s is {self.retry_s}; it must be above 0")
        for name, factors in (("slowdown", self.slowdown), ("wide_slowdown", self.wide_slowdown)):
            if not all(math.isfinite(factor) and factor > 0 for factor in factors):
                raise ConfigError(f"{name} is {factors}; its entries must be above 0")
        for failure in self.failures:
            if not (failure.time_s >= 0 and failure.down_s > 0):
                raise ConfigError(f"{failure}: time_s must not be negative, down_s must be above 0")
