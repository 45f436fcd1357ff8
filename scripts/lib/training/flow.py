"""Flow matching: what a transformer is trained to predict."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Timesteps are shifted towards noise, as the scheduler's are when an image is made.
SHIFT = 3.0
# Most of a picture is its plain background, which is learned soon: errors where there is a thing count so many times as
# much. A place has a thing where its latents are further from the medians of its picture than this share of the
# deviation of all.
_THING_TIMES, _THING_DISTANCE = 4.0, 0.25


@dataclass(frozen=True)
class NoisyLatents:
    """Latents between data and noise, on straight lines."""

    latents: torch.Tensor
    timesteps: torch.Tensor
    """(n,), from 0, which is data, to 1000, which is noise."""
    velocity: torch.Tensor
    """The way from the data to the noise: what is to be predicted."""


def add_noise(latents: torch.Tensor, shift: float = SHIFT) -> NoisyLatents:
    """Mix latents (n, ...) with noise, each at a level of its own that is drawn here, as often as a scheduler with this
    shift passes it: with fewer levels near data, outlines stay ragged.

    Random numbers are those of the CPU, wherever the latents are."""
    level = torch.rand(len(latents)).to(latents.device)
    sigma = shift * level / (1 + (shift - 1) * level)
    noise = torch.randn_like(latents, device="cpu").to(latents.device)
    share = sigma.view(-1, *[1] * (latents.ndim - 1))
    return NoisyLatents((1 - share) * latents + share * noise, sigma * 1000, noise - latents)


def compute_error(predicted: torch.Tensor, noisy: NoisyLatents) -> torch.Tensor:
    """The mean squared error of a predicted velocity."""
    return (predicted.float() - noisy.velocity).square().mean()


def compute_weighted_error(predicted: torch.Tensor, noisy: NoisyLatents, latents: torch.Tensor) -> torch.Tensor:
    """The same, weighted by the places of the `latents` without noise. Videos trained so have fewer right motions."""
    return (weigh_places(latents) * (predicted.float() - noisy.velocity).square()).mean()


def weigh_places(latents: torch.Tensor) -> torch.Tensor:
    """Weights, of mean 1, of the places of latents: (n, channels, ..., height, width) -> (n, 1, ..., height, width)."""
    medians = latents.flatten(-2).median(-1).values[..., None, None]
    distances = (latents - medians).square().mean(1, keepdim=True).sqrt()
    weights = torch.where(distances > _THING_DISTANCE * latents.std(), _THING_TIMES, 1.0)
    return weights / weights.mean()
