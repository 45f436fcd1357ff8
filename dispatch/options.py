"""The options of the dispatch policies: the efficiency filter, the weights of the objective, the solver."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from profiler.cost_model import EFFICIENCY_THRESHOLD
from tridentserve.engine.options import WorkerOptions
from tridentserve.options import options

DEFAULT_POLICY = "default"
SolverName = Literal["highs", "cbc"]
# The largest batch where each request runs alone, as images are exact only then: in batches a pixel may differ by 1 of
# 255.
NO_BATCHES = 1


def _check_power_of_two(degree: int) -> int:
    if degree & (degree - 1):
        raise ValueError("a degree is a power of two: 1, 2, 4, ...")
    return degree


Degree = Annotated[int, AfterValidator(_check_power_of_two)]


@options
class RewardOptions:
    """Weights of the objective (TridentServe, arXiv 2510.02838, section 6.2 and appendix C.2)."""

    on_time: float = Field(
        default=1000.0,
        description="Reward for a request that will meet its deadline, and the most that an overdue one can age to.",
    )
    late: float = Field(
        default=100.0,
        gt=0,
        description="Reward for a request whose deadline is out of reach, times one plus its overtime in units of its "
        "own runtime.",
    )
    condition_per_token: float = Field(
        default=1e-5, description="Penalty for moving the condition (E runs elsewhere), per token of the request."
    )
    latents_per_token: float = Field(
        default=1e-4,
        description="Penalty for moving the latents (C runs elsewhere), per token of the request. The latents outweigh "
        "the condition, so types rank V0, V1, V2, V3.",
    )
    gpu_seconds: float = Field(
        default=1.0,
        description="Price of a plan's GPU-seconds, in units of the request's GPU-seconds at the narrowest degree: a "
        "width beyond what is efficient must be worth it.",
    )
    latency: float = Field(
        default=1.0,
        description="Price of a plan's latency, in units of the request's latency at the narrowest degree: idle width "
        "that is efficient is used. With both prices equal, and E, C and waiting aside, degree k costs less than "
        "degree 1 when its efficiency is above (1 + 1/k) / 2: 0.75 at degree 2, 0.625 at degree 4.",
    )
    size: float = Field(
        default=20.0,
        description="Price of each doubling of a request's GPU-seconds: of requests that are worth the same, short "
        "ones go first.",
    )
    narrowing: int = Field(
        default=4,
        description="A request is not run narrower than its optimal degree divided by this number, unless it is long "
        "overdue (`TickView.choose_narrowing`). Narrow runs use up the slack to the last second, and fill workers "
        "so that wide ones never find several idle at once.",
    )
    pressure: float = Field(
        default=0.1,
        description="Pressure is the time that all primaries together need for the D of what waits, divided by the "
        "mean slack of these requests. Below this pressure `narrowing` counts half, and where C runs on auxiliaries it "
        "counts half again.",
    )


@options
class DispatchOptions:
    """The options of a policy, which assigns requests to workers."""

    min_efficiency: float = Field(
        default=EFFICIENCY_THRESHOLD,
        gt=0,
        le=1,
        description="Lowest parallel efficiency, T(1) / (k T(k)), at which a wider degree is used although a narrower "
        "one would meet the deadline (constraint C0). A higher value means narrower degrees.",
    )
    max_degree: Degree | None = Field(
        default=None,
        ge=1,
        description="Widest degree of sequence parallelism, a power of two; without it all degrees that were profiled "
        "and fit a node are used.",
    )
    handoff_reserve_bytes: int = Field(
        default=WorkerOptions().reserve_bytes,
        ge=0,
        description="The memory of each worker that the handoff buffer and the process groups take, in bytes.",
    )
    max_batch: int | None = Field(
        default=None,
        ge=1,
        description="Most requests of one size and number of steps that may share denoising steps, where the profile "
        "says that it pays; without it the policy's own number: 8 for `genserve`, `dit-serve` and `patchedserve`, 1 "
        "(no batches) for all others.",
    )
    overdue_first: bool = Field(
        default=True,
        description="Requests that are long overdue go first, one at a time, so that none starves "
        "(`dispatch.candidates.classes`); without it their reward stays that of a request in time, as in the paper.",
    )
    solver: SolverName = Field(default="highs", description="Solver of the integer program.")
    time_limit_s: float = Field(
        default=0.1,
        gt=0,
        description="Longest time of one solve, in seconds of the wall clock; then the best plan so far is used, or a "
        "greedy one where there is none.",
    )
    gap: float = Field(
        default=3e-3,
        ge=0,
        lt=1,
        description="With more than 100 requests that compete, a solution is good enough when no other can be worth "
        "more than this share above it; with fewer, the best one is looked for.",
    )
    rewards: RewardOptions = Field(default_factory=RewardOptions, description="Weights of the objective.")

    @property
    def batch_limit(self) -> int:
        """The number of requests that may run as one batch. In a policy that was made by its name `max_batch` is set
        (`PolicySpec.resolve`); a dispatcher that is built with options that leave it out makes no batches."""
        return NO_BATCHES if self.max_batch is None else self.max_batch
