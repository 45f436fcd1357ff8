"""A tiny Wan that starts from images."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tridentserve.pipelines.tiny import parts
from tridentserve.pipelines.tiny import wan as tiny_video_wan

# Pixels a side of what the CLIP sees.
_CLIP_SIDE = 28


def recipe() -> Any:
    """As Wan 2.1 I2V: latents of the image and a mask beside those of the video, cross-attention to a CLIP."""
    components = tiny_video_wan.components(
        in_channels=2 * parts.LATENT_CHANNELS + 4,
        image_dim=parts.CLIP_DIM,
        added_kv_proj_dim=parts.INNER_DIM,
    )
    return diffusers.WanImageToVideoPipeline(
        **components, image_encoder=_image_encoder(), image_processor=_image_processor()
    )


def _image_encoder() -> Any:
    config = transformers.CLIPVisionConfig(
        hidden_size=parts.CLIP_DIM,
        intermediate_size=2 * parts.CLIP_DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=_CLIP_SIDE,
        patch_size=14,
    )
    return transformers.CLIPVisionModel(config).eval()


def _image_processor() -> Any:
    crop = {"height": _CLIP_SIDE, "width": _CLIP_SIDE}
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": _CLIP_SIDE}, crop_size=crop)
