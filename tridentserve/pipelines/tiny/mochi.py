"""A tiny Mochi."""

from __future__ import annotations

from typing import Any

import diffusers

from tridentserve.pipelines.tiny import parts

_CHANNELS = 12


def build_pipeline() -> Any:
    """Build a Mochi 1. The norms of its VAE have 32 groups, so this is the widest VAE of the tiny pipelines."""
    tokenizer = parts.build_t5_tokenizer()
    transformer = diffusers.MochiTransformer3DModel(
        num_attention_heads=parts.HEADS,
        attention_head_dim=parts.HEAD_DIM,
        num_layers=2,
        pooled_projection_dim=parts.CLIP_DIM,
        in_channels=_CHANNELS,
        text_embed_dim=parts.T5_DIM,
        time_embed_dim=32,
    )
    vae = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        latent_channels=_CHANNELS,
        layers_per_block=(1, 1, 1, 1, 1),
    )
    parts.brighten(vae.decoder.proj_out)
    return diffusers.MochiPipeline(
        tokenizer=tokenizer,
        text_encoder=parts.build_t5_encoder(tokenizer),
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    )
