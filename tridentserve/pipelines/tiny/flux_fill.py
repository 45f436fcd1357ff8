"""A tiny FLUX.1 Fill."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from tridentserve.pipelines.tiny import flux, parts

# The pixels of the mask that a token covers.
_MASK_CHANNELS = 16 * 16


def build_pipeline() -> Any:
    """Build a FLUX.1 whose tokens have the latents of an image and a mask beside those of the output."""
    components = flux.build_pipeline().components
    parts.brighten(components["vae"].encoder.conv_out, 8.0)
    plain = components["transformer"]
    channels = plain.config.in_channels
    transformer = diffusers.FluxTransformer2DModel.from_config(
        plain.config, in_channels=2 * channels + _MASK_CHANNELS, out_channels=channels
    )
    further = transformer.x_embedder.weight.detach()[:, channels:]
    weights = plain.state_dict()
    weights["x_embedder.weight"] = torch.cat([weights["x_embedder.weight"], further], dim=1)
    transformer.load_state_dict(weights)
    needed = {name: part for name, part in components.items() if part is not None}
    return diffusers.FluxFillPipeline(**needed | {"transformer": transformer})
