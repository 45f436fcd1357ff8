"""Flow matching: what a transformer is trained to predict."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Timesteps are shifted towards noise, as the scheduler's are when an image is made.
SHIFT = 3.0


@dataclass(frozen=True)
class NoisyLatents:
    """Latents between data and noise, on straight lines."""

    latents: torch.Tensor
    timesteps: torch.Tensor
    """(n,), from 0, which is data, to 1000, which is noise."""
    velocity: torch.Tensor
    """The way from the data to the noise: what is to be predicted."""


def add_noise(latents: torch.Tensor) -> NoisyLatents:
    """Mix latents (n, ...) with noise, each at a level of its own that is drawn here, as often as the scheduler passes
    it: with fewer levels near data, outlines stay ragged."""
    level = torch.rand(len(latents))
    sigma = SHIFT * level / (1 + (SHIFT - 1) * level)
    noise = torch.randn_like(latents)
    share = sigma.view(-1, *[1] * (latents.ndim - 1))
    return NoisyLatents((1 - share) * latents + share * noise, sigma * 1000, noise - latents)
