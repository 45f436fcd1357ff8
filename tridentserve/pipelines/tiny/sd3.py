"""A tiny Stable Diffusion 3.5."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from tridentserve.pipelines.tiny import parts


def build_pipeline() -> Any:
    """Build a Stable Diffusion 3.5 medium: dual attention in the first block, normalized queries and keys."""
    tokenizer, tokenizer_3 = parts.build_clip_tokenizer(), parts.build_t5_tokenizer()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=64,
        patch_size=2,
        in_channels=parts.LATENT_CHANNELS,
        out_channels=parts.LATENT_CHANNELS,
        num_layers=2,
        num_attention_heads=parts.HEADS,
        attention_head_dim=parts.HEAD_DIM,
        joint_attention_dim=parts.T5_DIM,
        caption_projection_dim=parts.INNER_DIM,
        pooled_projection_dim=2 * parts.CLIP_DIM,
        pos_embed_max_size=128,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    # The embedder takes a patch as (channel, row, column), and the output projection returns (row, column, channel).
    order = torch.arange(parts.INNER_DIM).view(parts.LATENT_CHANNELS, 2, 2).permute(1, 2, 0).flatten()
    parts.untangle(transformer.pos_embed.proj, transformer.proj_out, order)
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.build_image_vae(scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=transformers.CLIPTextModelWithProjection(parts.build_clip_config(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=transformers.CLIPTextModelWithProjection(parts.build_clip_config(tokenizer)),
        tokenizer_2=parts.build_clip_tokenizer(),
        text_encoder_3=parts.build_t5_encoder(tokenizer_3),
        tokenizer_3=tokenizer_3,
    )
