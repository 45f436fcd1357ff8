"""The options of a simulation, beyond the cluster and the trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from tridentserve.engine.options import LoopOptions, WorkerOptions
from tridentserve.errors import ConfigError
from tridentserve.options import options
from tridentserve.plans import WorkerId
from tridentserve.scheduling.tick_pacer import RETRY_S

Seconds = Annotated[float, Field(ge=0)]
Factor = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker is lost with all that it holds, and comes back with the replicas of its placement resident."""

    time_s: float
    """The time at which the worker is lost."""
    worker_id: WorkerId
    down_s: float
    """The seconds until it is back."""


@dataclass(frozen=True, slots=True)
class FailingWorker:
    """A worker that lives on while its plans fail, as with a broken device. Those that had begun before end well."""

    worker_id: WorkerId
    begin_s: float = 0.0
    end_s: float = math.inf
    """The time from which on its plans end well again."""
    after_s: float = 0.02
    """Seconds from the start of a plan to its failure."""


@options
class SimulationOptions(LoopOptions):
    """Behaviour and costs of a simulated service, in seconds of the simulation."""

    retry_s: float = Field(
        default=RETRY_S,
        gt=0,
        description="Longest time between two ticks while requests wait, in seconds, even if nothing happens.",
    )
    solve_time: Literal["measured"] | Seconds = Field(
        default=0.0,
        description="Seconds that a tick costs; `measured` charges its real time, so that runs differ.",
    )
    jitter: float = Field(
        default=0.0,
        ge=0,
        description="Relative standard deviation of stage times (lognormal, mean 1), drawn from `seed` and the "
        "request's id: policies that are compared meet the same luck.",
    )
    seed: int = Field(default=0, description="Seed of the jitter.")
    plan_overhead_s: float = Field(
        default=0.0, ge=0, description="Time from when a plan is sent until its workers can start it, in seconds."
    )
    report_overhead_s: float = Field(
        default=0.0, ge=0, description="Time from the end of a plan until the scheduler knows of it, in seconds."
    )
    image_s_per_pixel: float = Field(
        default=0.0,
        ge=0,
        description="Seconds that each decoded pixel adds to `report_overhead_s`, as files are made then.",
    )
    slowdown: tuple[Factor, ...] = Field(
        default=(),
        description="Entry n - 1 is how many times as long everything takes while n workers of a node compute at once, "
        "as CPU workers share cores; without entries workers do not slow each other down.",
    )
    wide_slowdown: tuple[Factor, ...] = Field(
        default=(),
        description="`slowdown` of plans on several workers, which wait for each other; without entries `slowdown`.",
    )
    group_setup_s: float = Field(default=0.0, ge=0, description="Time of the first use of a group, in seconds.")
    handoff_capacity_bytes: int = Field(
        default=WorkerOptions().handoff_bytes,
        ge=0,
        description="Size of the handoff buffer of each worker, in bytes. It is taken from the worker's memory; what "
        "does not fit waits in the host memory of the worker that made it.",
    )
    group_bytes: int = Field(
        default=WorkerOptions().group_bytes,
        ge=0,
        description="Bytes of each worker's memory that its process groups take.",
    )
    held_loras: int = Field(
        default=16,
        ge=0,
        description="Most LoRAs that each worker keeps between plans; a simulation knows no files, and so no bytes.",
    )
    failures: tuple[WorkerFailure, ...] = Field(default=(), description="Workers that are lost, and when.")
    failing: tuple[FailingWorker, ...] = Field(default=(), description="Workers whose plans fail, and when.")
    max_idle_s: float = Field(
        default=60.0,
        ge=0,
        description="When nothing has happened for this time, in seconds, and nothing will, requests that still wait "
        "are left unfinished.",
    )
    end_s: float = Field(
        default=math.inf, allow_inf_nan=True, description="When the simulation stops, in seconds, whatever still runs."
    )
    keep_plans: bool = Field(default=False, description="The result holds every plan and the stages of every request.")
    decodes_in_tiles: bool = Field(
        default=True,
        description="A worker that is short of memory decodes in tiles and encodes one request after another.",
    )
    on_progress: Callable[[float, int], None] | None = Field(
        default=None,
        description="Is called with the time and the number of requests that have ended, whenever one ends.",
    )

    @property
    def reserve_bytes(self) -> int:
        """Bytes of each worker's memory that the handoff buffer and the process groups take."""
        return self.handoff_capacity_bytes + self.group_bytes

    def __post_init__(self) -> None:
        for failure in self.failures:
            if not (failure.time_s >= 0 and failure.down_s > 0):
                raise ConfigError(f"{failure}: time_s must not be negative, down_s must be above 0")
        for failing in self.failing:
            if not (0 <= failing.begin_s < failing.end_s and failing.after_s >= 0):
                raise ConfigError(f"{failing}: begin_s must not be negative nor after end_s, after_s not be negative")
