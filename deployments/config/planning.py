"""The sections of the configuration that say how requests and stages are planned: load, policy, replanning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from deployments.config.base import Args, Name, config_error
from dispatch.policies import find_policy
from tridentserve.errors import ConfigError
from tridentserve.requests import Shape


class LoadArgs(Args):
    """One kind of request that is expected, and its share among them; placements are made for it."""

    model: Name = Field(description="the `name` of a model")
    width: int = Field(ge=1, description="pixels")
    height: int = Field(ge=1, description="pixels")
    num_frames: int = Field(default=1, ge=1, description="of a video; 1 for a picture")
    num_inference_steps: int = Field(ge=1, description="denoising steps")
    weight: float = Field(default=1.0, gt=0, description="share of this kind, relative to the other weights")

    @property
    def shape(self) -> Shape:
        return Shape(self.height, self.width, self.num_frames)


class DispatchArgs(Args):
    """How requests are assigned to workers (docs/planning.md)."""

    policy: str = Field(default="default", description="Name of the dispatch policy, or a dotted path to one.")
    tick_ms: float = Field(default=5, gt=0, description="shortest time between two ticks")
    solver: Literal["highs", "cbc"] = Field(default="highs", description="of the integer program")
    time_limit_ms: float = Field(default=100, gt=0, description="of one solve; then the greedy plan is used")
    max_degree: int | None = Field(
        default=None, ge=1, description="of sequence parallelism; None: all that were profiled"
    )
    max_batch: int | None = Field(
        default=None, ge=1, description="requests of one size that may share denoising steps; None: the policy's own"
    )
    min_efficiency: float = Field(default=0.8, gt=0, le=1, description="of degrees that are used without need")
    overdue_first: bool = Field(default=True, description="requests that are long overdue go first")

    @field_validator("policy")
    @classmethod
    def _known(cls, policy: str) -> str:
        try:
            find_policy(policy)
        except ConfigError as error:
            raise config_error("", str(error)) from None
        return policy

    @field_validator("max_degree")
    @classmethod
    def _power_of_two(cls, degree: int | None) -> int | None:
        if degree is not None and degree & (degree - 1):
            raise config_error("", "a degree is a power of two: 1, 2, 4, ...")
        return degree


class ReplanArgs(Args):
    """When the placement follows the load (docs/planning.md)."""

    enabled: bool | None = Field(default=None, description="None: with `placement: auto`, for policies that follow it")
    window_s: float = Field(default=60, gt=0, description="over which arrivals and stages are counted")
    min_requests: int = Field(default=8, ge=1, description="in the window, before a measured rate counts")
    min_arrivals: int = Field(default=150, ge=0, description="with fewer, the window reaches back five times as far")
    trigger_ratio: float = Field(default=1.5, ge=1, description="fastest stage over slowest, from which to plan anew")
    release_ratio: float = Field(default=1.2, ge=1, description="below which that is over")
    hold_s: float = Field(default=5, ge=0, description="how long it must last")
    min_interval_s: float = Field(default=30, ge=0, description="between two placements")
    check_interval_s: float = Field(default=1, ge=0, description="between two looks at the window")
    min_gain: float = Field(default=0.15, ge=0, description="how much faster the slowest stage must get")
    noise_factor: float = Field(default=2, ge=0, description="standard errors that the gain must exceed")
    min_pressure: float = Field(default=0.3, ge=0, description="work per worker below which nothing is changed")
    settle_s: float = Field(default=2, ge=0, description="that workers must have stayed the same")

    @model_validator(mode="after")
    def _release_is_lower(self) -> ReplanArgs:
        if self.release_ratio > self.trigger_ratio:
            raise config_error("release_ratio", f"not above trigger_ratio ({self.trigger_ratio:g})")
        return self
