"""A tiny PixArt-Sigma."""

from __future__ import annotations

from typing import Any

import diffusers

from tridentserve.pipelines.tiny import parts

_CHANNELS = 4


def build_pipeline() -> Any:
    """Build a PixArt-Sigma XL 2: the output holds a variance, and sizes are no inputs."""
    tokenizer = parts.build_t5_tokenizer()
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=parts.HEADS,
        attention_head_dim=parts.HEAD_DIM,
        in_channels=_CHANNELS,
        out_channels=2 * _CHANNELS,
        num_layers=2,
        cross_attention_dim=parts.INNER_DIM,
        sample_size=64,
        use_additional_conditions=False,
        caption_channels=parts.T5_DIM,
    )
    parts.untangle_with_variance(transformer.pos_embed.proj, transformer.proj_out, _CHANNELS)
    return diffusers.PixArtSigmaPipeline(
        transformer=transformer,
        # The real scheduler has more noise. The error of an untrained model is divided by the remaining signal.
        scheduler=diffusers.DPMSolverMultistepScheduler(beta_end=0.004),
        vae=parts.build_image_vae(scaling_factor=0.13025, latent_channels=_CHANNELS),
        text_encoder=parts.build_t5_encoder(tokenizer),
        tokenizer=tokenizer,
    )
