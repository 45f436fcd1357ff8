"""A tiny Wan with an input image."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tridentserve.pipelines.tiny import parts, wan

# The side of the CLIP's input in pixels.
_CLIP_SIDE = 28


def build_pipeline() -> Any:
    """Build a Wan 2.1 I2V: additional channels for the image's latents and a mask, cross-attention to a CLIP."""
    components = wan.build_components(
        in_channels=2 * parts.LATENT_CHANNELS + 4,
        image_dim=parts.CLIP_DIM,
        added_kv_proj_dim=parts.INNER_DIM,
    )
    return diffusers.WanImageToVideoPipeline(
        **components, image_encoder=_build_image_encoder(), image_processor=_build_image_processor()
    )


def _build_image_encoder() -> Any:
    config = transformers.CLIPVisionConfig(
        hidden_size=parts.CLIP_DIM,
        intermediate_size=2 * parts.CLIP_DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=_CLIP_SIDE,
        patch_size=14,
    )
    return transformers.CLIPVisionModel(config).eval()


def _build_image_processor() -> Any:
    crop = {"height": _CLIP_SIDE, "width": _CLIP_SIDE}
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": _CLIP_SIDE}, crop_size=crop)
