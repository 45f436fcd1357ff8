"""The sections of the configuration that say how requests and stages are planned: load, policy, replanning."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, field_validator

from deployments.config.base import MILLISECONDS, Args, Name, collect_values, make_config_error, make_option
from dispatch import DispatchOptions
from dispatch.options import DEFAULT_POLICY, BatchLimit, Degree, Positive, SolverName
from dispatch.policies import find_policy
from placement import ReplanOptions
from tridentserve.engine.options import EngineOptions
from tridentserve.errors import ConfigError
from tridentserve.requests import Shape


class LoadArgs(Args):
    """One kind of request that is expected, and its share among them; placements are made for it."""

    model: Name = Field(description="The `name` of the model that is asked for.")
    width: int = Field(ge=1, description="Width of the image or video, in pixels.")
    height: int = Field(ge=1, description="Height of the image or video, in pixels.")
    num_frames: int = Field(default=1, ge=1, description="Number of frames of a video; an image has one.")
    num_inference_steps: int = Field(ge=1, description="Number of denoising steps.")
    weight: float = Field(default=1.0, gt=0, description="Number of requests of this kind, relative to the others.")

    @property
    def shape(self) -> Shape:
        return Shape(self.height, self.width, self.num_frames)


class DispatchArgs(Args):
    """Options of the dispatcher, which assigns requests to workers (docs/planning.md)."""

    policy: str = Field(
        default=DEFAULT_POLICY,
        description="Name of the dispatch policy, see below, or a [dotted path to one](write-a-policy.md).",
    )
    tick_ms: float = make_option(
        EngineOptions, "tick_s", MILLISECONDS, "Shortest time between two ticks, in milliseconds."
    )
    solver: SolverName = make_option(DispatchOptions, "solver")
    time_limit_ms: float = make_option(
        DispatchOptions,
        "time_limit_s",
        MILLISECONDS,
        "Longest time of one solve, in milliseconds; then the best plan so far is used, or a greedy one where there is "
        "none.",
    )
    max_degree: Degree | None = make_option(DispatchOptions, "max_degree")
    max_batch: BatchLimit | None = make_option(DispatchOptions, "max_batch")
    pack_sizes: tuple[str, ...] = make_option(DispatchOptions, "pack_sizes")
    ring_sizes: tuple[str, ...] = make_option(DispatchOptions, "ring_sizes")
    min_efficiency: float = make_option(DispatchOptions, "min_efficiency")
    request_weights: Mapping[str, Positive] | None = make_option(DispatchOptions, "request_weights")
    fair_shares: Mapping[str, Positive] | None = make_option(DispatchOptions, "fair_shares")
    overdue_share: float = make_option(
        DispatchOptions,
        "overdue_share",
        description="Share of the workers' time that requests that are long overdue have before all others, one at a "
        "time in order of deadlines, while any of them waits. With 0 they may starve.",
    )

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str) -> str:
        try:
            find_policy(policy)
        except ConfigError as error:
            raise make_config_error("", str(error)) from None
        return policy


class ReplanArgs(Args):
    """Options of the replanner, which makes the placement follow the load (docs/planning.md)."""

    enabled: bool | None = Field(
        default=None,
        description="Turns replanning on or off. Without it replanning is on with `placement: auto` and a policy that "
        "follows the load (`default`, `tridentserve-paper`, `wo-stage-aware`, `wo-scheduler`, `wo-overdue`, "
        "`wo-pooling`, `edf`, `segments`).",
    )
    window_s: float = make_option(ReplanOptions, "window_s")
    shortest_window_s: float = make_option(ReplanOptions, "shortest_window_s")
    min_requests: int = make_option(ReplanOptions, "min_requests")
    trigger_ratio: float = make_option(ReplanOptions, "trigger_ratio")
    check_interval_s: float = make_option(ReplanOptions, "check_interval_s")
    settle_s: float = make_option(ReplanOptions, "settle_s")

    def make_options(self) -> ReplanOptions:
        return ReplanOptions(**collect_values(ReplanOptions, self))
