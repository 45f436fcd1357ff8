"""A tiny HunyuanVideo 1.5 with an input image."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tridentserve.pipelines.tiny import hunyuan_video_15

# The side of the SigLIP's input in pixels.
_SIDE = 28


def build_pipeline() -> Any:
    """Build a HunyuanVideo 1.5 I2V: a SigLIP in addition to the text encoders."""
    config = transformers.SiglipVisionConfig(
        hidden_size=hunyuan_video_15.IMAGE_DIM,
        intermediate_size=2 * hunyuan_video_15.IMAGE_DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=_SIDE,
        patch_size=14,
    )
    return hunyuan_video_15.assemble_pipeline(
        diffusers.HunyuanVideo15ImageToVideoPipeline,
        "i2v",
        image_encoder=transformers.SiglipVisionModel(config).eval(),
        feature_extractor=transformers.SiglipImageProcessorPil(size={"height": _SIDE, "width": _SIDE}),
    )
