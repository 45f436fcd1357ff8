"""The options of the dispatch policies: the efficiency filter, the weights of the objective, the solver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from profiler.cost_model import EFFICIENCY_THRESHOLD, LARGEST_BATCH
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


def _read_batch(value: Any) -> Any:
    return LARGEST_BATCH if value == "auto" else value


Degree = Annotated[int, AfterValidator(_check_power_of_two)]
BatchLimit = Annotated[int, BeforeValidator(_read_batch)]
Positive = Annotated[float, Field(gt=0)]


@options
class ValueOptions:
    """The parts of the value that a group of workers has for a request (`dispatch.candidates.values`,
    docs/policy.md)."""

    horizon: float = Field(
        default=0.25,
        gt=0,
        description="Time in which the urgency of a request falls by a factor of e while it has slack, in units of the "
        "mean time from arrival to deadline of what waits.",
    )
    calm: float | None = Field(
        default=4.0,
        ge=0,
        description="While no request that could have been in time has become hopeless for this many horizons, the "
        "earliest deadline goes first, however much it takes; without it never.",
    )
    spare: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the time to the deadline that an efficient group must leave to spare for a request to "
        "use efficient groups alone.",
    )
    hopeless: float = Field(
        default=1e-3,
        gt=0,
        description="Urgency of a request that cannot be in time any more; it falls with the logarithm of what is left "
        "to do.",
    )
    hopeless_at_optimal: bool = Field(
        default=True,
        description="A request that cannot be in time any more runs at its optimal degree alone; without it, at any "
        "efficient one.",
    )
    overdue_runs: float = Field(
        default=50.0,
        gt=0,
        description="A request that can only end this many of its own shortest runtimes after its deadline is long "
        "overdue.",
    )


@options
class DispatchOptions:
    """The options of a policy, which assigns requests to workers."""

    min_efficiency: float = Field(
        default=EFFICIENCY_THRESHOLD,
        gt=0,
        le=1,
        description="Lowest parallel efficiency, T(1) / (k T(k)), of degrees that count as efficient, of which the "
        "widest is the optimal one. A higher value means narrower degrees where a policy asks for efficient ones; the "
        "default runs a hopeless request at the optimal degree, one that is long overdue at any efficient one, and "
        "one that has time to spare at degrees that are about as efficient, or less where the load is low.",
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
    max_batch: BatchLimit | None = Field(
        default=None,
        ge=1,
        description="Most requests of one size and number of steps that may share denoising steps, where the profile "
        "says that it pays; `auto` is the 8 of the policies that live on batches; without it the policy's own number: "
        "8 for `genserve`, `dit-serve*`, `patchedserve` and `tridentserve-paper`, 1 (no batches) for all others.",
    )
    pack_sizes: tuple[str, ...] = Field(
        default=(),
        description="Models of which requests of different sizes may share denoising steps too, on one worker, in "
        "batches of up to `max_batch`, where the profile says that packed steps take less time than steps one by one. "
        "Their families are to be `sd3`, `flux`, `wan` or `sdxl`. Of the policies that do not solve an integer program "
        "`dit-serve*` and `patchedserve` do so too; the others ignore it.",
    )
    ring_sizes: tuple[str, ...] = Field(
        default=(),
        description="Models of `pack_sizes` of which requests of different sizes may share denoising steps on several "
        "workers too, each on a ring of its own: a long one on many, a short one on few or on one alone. Their "
        "families are to be `sd3`, `flux` or `wan`.",
    )
    overdue_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Share of the workers' time that requests that are long overdue have before all others, one at a "
        "time in order of deadlines, while any of them waits; so none starves (`dispatch.holding.overdue`). With 0 "
        "they wait for as long as others come that can be in time.",
    )
    gather_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Share of the workers' time in which idle workers of a node may wait for its others, so that a "
        "request gets several at once (`dispatch.holding.gathering`); with 0 none waits.",
    )
    gather_excess: float = Field(
        default=0.05,
        ge=0,
        description="Most GPU-seconds that the wider group may take beyond those of the group that could be had at "
        "once, waiting included, over the latter.",
    )
    request_weights: Mapping[str, Positive] | None = Field(
        default=None,
        description="Weights of requests in the default policy, by the model's name. A model that is not named has "
        "weight 1.",
    )
    fair_shares: Mapping[str, Positive] | None = Field(
        default=None,
        description="Fair shares of the GPU-seconds, by the model's name, relative to each other: while models that "
        "are named compete, one that had less than its share lately is worth more to the default policy, and one that "
        "had more is worth less. No worker idles because of it.",
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
    keep_free: bool = Field(
        default=True,
        description="Where steps take longer than short requests can wait, as many workers as these need are kept from "
        "work that takes long (`dispatch.holding.reserve`).",
    )
    segment_s: float = Field(
        default=1.0,
        gt=0,
        description="Most seconds of D after which it is decided anew which workers a request has; at least one step.",
    )
    least_segment_s: float = Field(
        default=0.25,
        gt=0,
        description="Least seconds of that: where requests can hardly wait for a worker, it is decided anew more often "
        "(`dispatch.candidates.arrivals`). Each time costs a plan, which takes milliseconds.",
    )
    objective: ValueOptions = Field(default_factory=ValueOptions, description="The values of groups.")

    @property
    def batch_limit(self) -> int:
        """The number of requests that may run as one batch. In a policy that was made by its name `max_batch` is set
        (`PolicySpec.resolve`); a dispatcher that is built with options that leave it out makes no batches."""
        return NO_BATCHES if self.max_batch is None else self.max_batch
