"""The dispatcher's settings: the efficiency filter, the weights of the objective, the solver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from profiler.cost_model import EFFICIENCY_THRESHOLD
from tridentserve.errors import ConfigError

SolverName = Literal["HiGHS", "CBC"]


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """Weights of the objective (TridentServe, arXiv 2510.02838, section 6.2 and appendix C.2).

    `on_time`: for a request that will meet its deadline, and the most that an overdue one can age to.
    `late`: for a request whose deadline is out of reach, times one plus its overtime in units of its own runtime.
    `condition_per_token`, `latents_per_token`: penalty for moving the condition (E elsewhere) or the latents (C
    elsewhere), per token of the request. The latents outweigh the condition, so types rank V0, V1, V2, V3.
    `gpu_seconds`: price of a plan's GPU-seconds, in units of the request's GPU-seconds at the narrowest degree: wider
    than is efficient must be worth it.
    `latency`: price of a plan's latency, in units of the request's latency at the narrowest degree: idle width that
    is efficient is used. With both prices equal, a width is worth it when its efficiency is above 0.75.
    `size`: price of each doubling of a request's GPU-seconds: of requests that are worth the same, short ones go first.
    `narrowing`, `pressure`: a request is not run narrower than its optimal degree divided by this, or by half of it
    while less waits than `pressure` says (`dispatch.candidates.narrowing`), unless it is long overdue; where C runs on
    auxiliaries, by half of either. Narrow runs use up the slack to the last second, and fill workers so that wide
    ones never find several idle at once.
    """

    on_time: float = 1000.0
    late: float = 100.0
    condition_per_token: float = 1e-5
    latents_per_token: float = 1e-4
    gpu_seconds: float = 1.0
    latency: float = 1.0
    size: float = 20.0
    narrowing: int = 4
    pressure: float = 0.1


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """`min_efficiency`: degrees below it are used only where nothing narrower meets the deadline (constraint C0).
    `max_degree`: no wider degree is used; None: whatever was profiled and fits a node.
    `handoff_reserve_bytes`: what the handoff buffer takes of each worker's memory.
    `max_batch`: at most so many requests of one size and number of steps run together, and never more than the
    profile's optimal batch; 1: none do.
    `overdue_first`: requests that are long overdue go first, one at a time, so that none starves
    (`dispatch.candidates.overdue`); without it their reward stays that of a request in time, as in the paper.
    `solver`, `time_limit_s`: at the limit the best solution so far is taken, or a greedy one when there is none.
    `gap`: with more than 100 requests that compete, a solution is good enough when no other can be worth more than this
    share above it; with fewer, the best one is looked for.
    """

    min_efficiency: float = EFFICIENCY_THRESHOLD
    max_degree: int | None = None
    handoff_reserve_bytes: int = 0
    max_batch: int = 1
    overdue_first: bool = True
    solver: SolverName = "HiGHS"
    time_limit_s: float = 0.25
    gap: float = 3e-3
    rewards: RewardOptions = field(default_factory=RewardOptions)

    def __post_init__(self) -> None:
        if not 0 < self.min_efficiency <= 1:
            raise ConfigError(f"min_efficiency is {self.min_efficiency}; it must be above 0 and at most 1")
        if self.max_degree is not None and self.max_degree < 1:
            raise ConfigError(f"max_degree is {self.max_degree}; it must be at least 1")
        if self.handoff_reserve_bytes < 0:
            raise ConfigError(f"handoff_reserve_bytes is {self.handoff_reserve_bytes}; it must not be negative")
        if self.max_batch < 1:
            raise ConfigError(f"max_batch is {self.max_batch}; it must be at least 1")
        if not 0 <= self.gap < 1:
            raise ConfigError(f"gap is {self.gap}; it must be at least 0 and below 1")
        if self.solver not in ("HiGHS", "CBC"):
            raise ConfigError(f"solver is {self.solver!r}; it must be HiGHS or CBC")
        if not self.time_limit_s > 0:
            raise ConfigError(f"time_limit_s is {self.time_limit_s}; it must be above 0")
