"""A tiny FLUX.1 Kontext."""

from __future__ import annotations

from typing import Any

import diffusers

from tridentserve.pipelines.tiny import flux, parts


def build_pipeline() -> Any:
    """Build a FLUX.1 whose image latents are about as large as noise and have an effect on the attention."""
    components = flux.build_pipeline().components
    parts.brighten(components["vae"].encoder.conv_out, 8.0)
    transformer = components["transformer"]
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        parts.brighten(block.attn.to_v, 8.0)
    return diffusers.FluxKontextPipeline(**components)
