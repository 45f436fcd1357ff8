"""A tiny FLUX.1 Kontext."""

from __future__ import annotations

from typing import Any

import diffusers

from tridentserve.pipelines.tiny import flux as tiny_flux
from tridentserve.pipelines.tiny import parts


def recipe() -> Any:
    """The modules of a FLUX.1, with latents of images that are about as large as noise, and are looked at."""
    components = tiny_flux.recipe().components
    parts.brighten(components["vae"].encoder.conv_out, 8.0)
    transformer = components["transformer"]
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        parts.brighten(block.attn.to_v, 8.0)
    return diffusers.FluxKontextPipeline(**components)
