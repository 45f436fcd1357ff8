"""A tiny Z-Image."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from tridentserve.pipelines.tiny import parts

_TEXT_DIM, _TEXT_LAYERS = 32, 3


def build_pipeline() -> Any:
    """Build a Z-Image, which is not distilled and so has guidance by two passes."""
    tokenizer = parts.build_qwen3_tokenizer()
    return diffusers.ZImagePipeline(
        transformer=_build_transformer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.build_image_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=_build_text_encoder(tokenizer),
        tokenizer=tokenizer,
    )


def _build_transformer() -> Any:
    model = diffusers.ZImageTransformer2DModel(
        in_channels=parts.LATENT_CHANNELS,
        dim=parts.INNER_DIM,
        n_layers=2,
        n_refiner_layers=2,
        n_heads=parts.HEADS,
        n_kv_heads=parts.HEADS,
        cap_feat_dim=_TEXT_DIM,
        axes_dims=[4, 6, 6],
    )
    # Random tokens show whether those that fill up an image or a text are where the real model has them.
    torch.nn.init.normal_(model.x_pad_token)
    torch.nn.init.normal_(model.cap_pad_token)
    output = model.all_final_layer["2-1"].linear
    parts.untangle(model.all_x_embedder["2-1"], output, torch.arange(parts.INNER_DIM))
    # The model predicts the direction to the image, and the pipeline turns it around.
    output.weight.data.neg_()
    return model


def _build_text_encoder(tokenizer: Any) -> Any:
    config = parts.build_qwen3_config(tokenizer, _TEXT_DIM, _TEXT_LAYERS)
    return transformers.Qwen3Model(config).eval()
