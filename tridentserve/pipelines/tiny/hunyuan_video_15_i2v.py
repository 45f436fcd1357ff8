"""A tiny HunyuanVideo 1.5 that starts from images."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tridentserve.pipelines.tiny import hunyuan_video_15 as text

# Pixels a side of what the SigLIP sees.
_SIDE = 28


def recipe() -> Any:
    """As HunyuanVideo 1.5 I2V: a SigLIP beside the text encoders."""
    config = transformers.SiglipVisionConfig(
        hidden_size=text.IMAGE_DIM,
        intermediate_size=2 * text.IMAGE_DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=_SIDE,
        patch_size=14,
    )
    return text.pipeline(
        diffusers.HunyuanVideo15ImageToVideoPipeline,
        "i2v",
        image_encoder=transformers.SiglipVisionModel(config).eval(),
        feature_extractor=transformers.SiglipImageProcessorPil(size={"height": _SIDE, "width": _SIDE}),
    )
