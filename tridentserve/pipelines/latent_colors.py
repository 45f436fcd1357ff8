"""Colours of latents without their VAE: a linear map from the channels of a latent to red, green and blue.

Each latent of the VAEs stands for a square of pixels, whose mean colour is nearly a linear function of its channels. So
a picture of the size of the latents costs a small product of matrices, where the VAE takes as long as several denoising
steps. The map is fitted by least squares to what the VAE itself makes of random latents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, interpolate

from tridentserve.pipelines.base import PipelineAdapter
from tridentserve.pipelines.pixels import round_pixels

# Latents for the fit: smooth ones, as those of images are, of several scales. They are few, since a VAE takes a CPU
# seconds for each.
_SIDE = 16
_GRID_SIDES = (3, 6, 8)
# Keeps the map from following what these few have by chance.
_RIDGE = 0.05
# Pictures larger than this are shrunk by a whole number.
MAX_SIDE = 256


@dataclass(frozen=True, slots=True)
class LatentColors:
    """The map of one VAE."""

    weights: torch.Tensor
    """(channels + 1, 3); the last row is the colour of zeros."""

    def paint(self, sketch: torch.Tensor) -> NDArray[np.uint8]:
        """Paint latents in the form of `PipelineAdapter.sketch`: (num_outputs, height, width, 3)."""
        shrink = -(-max(sketch.shape[-2:]) // MAX_SIDE)
        smaller = avg_pool2d(sketch, shrink, ceil_mode=True) if shrink > 1 else sketch
        return round_pixels(self.predict(smaller).clamp(0, 1))

    def predict(self, sketch: torch.Tensor) -> torch.Tensor:
        """The colours that the map gives to latents, not yet cut off to 0 to 1: (num_outputs, 3, height, width)."""
        return (torch.einsum("nchw,ck->nkhw", sketch, self.weights[:-1])) + self.weights[-1].view(1, 3, 1, 1)


def fit_colors(adapter: PipelineAdapter) -> LatentColors:
    """Fit the map to the VAE of an adapter that holds stage C. It is the same one each time, up to rounding."""
    generator = torch.Generator("cpu").manual_seed(0)
    channels, latents, colors = adapter.count_sketch_channels(), [], []
    for side in _GRID_SIDES:
        sketch = draw_sketch(channels, side, generator)
        pixels = adapter.decode_sketch(sketch)
        latents.append(_list_points(sketch))
        colors.append(_list_points(adaptive_avg_pool2d(pixels, (_SIDE, _SIDE))))
    points = torch.cat(latents)
    known = torch.cat([points, torch.ones(len(points), 1)], dim=1).double()
    ridge = torch.diag(torch.tensor([_RIDGE * len(points)] * channels + [0.0], dtype=torch.float64))
    weights = torch.linalg.solve(known.T @ known + ridge, known.T @ torch.cat(colors).double())
    return LatentColors(weights.float())


def draw_sketch(channels: int, grid_side: int, generator: torch.Generator) -> torch.Tensor:
    """Draw noise of a mean square of 1 that varies as smoothly as `grid_side` points per side do: (1, channels, height,
    width)."""
    noise = torch.randn(1, channels, grid_side, grid_side, generator=generator)
    smooth = interpolate(noise, (_SIDE, _SIDE), mode="bilinear")
    return smooth / smooth.square().mean(dim=(-2, -1), keepdim=True).sqrt()


def _list_points(image: torch.Tensor) -> torch.Tensor:
    """The points of images, (num, channels, height, width), one a row: (points, channels)."""
    return image.movedim(1, -1).flatten(0, -2)
