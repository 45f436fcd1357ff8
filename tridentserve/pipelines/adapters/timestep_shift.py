"""The timestep shift of flow matching models, which depends on the size of the output."""

from __future__ import annotations

from typing import Any

from diffusers.pipelines.flux.pipeline_flux import calculate_shift


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
