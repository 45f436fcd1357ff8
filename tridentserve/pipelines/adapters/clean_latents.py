"""Predicts the latents that a request will end with, from its latents before and after one denoising step."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from tridentserve.pipelines.adapters.denoising_request import SCHEDULER_PREFIX
from tridentserve.pipelines.base import DenoisingState


def predict_clean(scheduler: Any, before: torch.Tensor, state: DenoisingState) -> torch.Tensor:
    """Predict the latents without noise, in float32: the line through `before`, the latents one step earlier, and those
    of `state`, up to the last noise level. For an Euler step of flow matching this is x - sigma * v, the transformer's
    own prediction. Where a scheduler of this class does not move along such lines, the latents as they are."""
    after = state.tensors["latents"].float()
    sigmas, timesteps = (state.tensors.get(SCHEDULER_PREFIX + name) for name in ("sigmas", "timesteps"))
    if sigmas is None or timesteps is None or len(sigmas) != len(timesteps) + 1 or not _moves_straight(scheduler):
        return after
    # From the end, as a request that starts from an image does not compute the first steps of its schedule.
    index = state.step - state.num_steps - 1
    earlier, later, last = float(sigmas[index - 1]), float(sigmas[index]), float(sigmas[-1])
    if earlier == later:
        return after
    return after + (last - later) / (later - earlier) * (after - before.to(after))


def _moves_straight(scheduler: Any) -> bool:
    """True when latents are a clean image plus noise in proportion to sigma, or a mixture of both by sigma."""
    if isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler | diffusers.EulerDiscreteScheduler):
        return not scheduler.config.get("stochastic_sampling")
    return bool(scheduler.config.get("use_flow_sigmas"))
