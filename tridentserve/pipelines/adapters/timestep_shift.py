"""The timesteps of flow matching models, whose shift depends on the size of the output."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
from numpy.typing import NDArray


def compute_shift_mu(config: Any, image_tokens: int, max_shift: float) -> float:
    """Compute the timestep shift `mu` for a number of image tokens; `max_shift` counts where `config` has none."""
    mu: float = calculate_shift(
        image_tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )
    return mu


def set_shifted_timesteps(
    scheduler: Any, num_inference_steps: int, device: torch.device, sigmas: NDArray[np.float64] | None, mu: float
) -> None:
    """Set the timesteps of a request, from its first one, as the stock pipelines of this kind do; without `sigmas`
    those of the scheduler."""
    retrieve_timesteps(scheduler, num_inference_steps, device, sigmas=sigmas, mu=mu)
    scheduler.set_begin_index(0)
