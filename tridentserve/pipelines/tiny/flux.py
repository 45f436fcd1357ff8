"""A tiny FLUX.1."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from tridentserve.pipelines.tiny import parts


def build_pipeline() -> Any:
    """Build a FLUX.1-dev: double and single blocks, guidance as an embedding."""
    tokenizer, tokenizer_2 = parts.build_clip_tokenizer(), parts.build_t5_tokenizer()
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * parts.LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=2,
        num_attention_heads=parts.HEADS,
        attention_head_dim=parts.HEAD_DIM,
        joint_attention_dim=parts.T5_DIM,
        pooled_projection_dim=parts.CLIP_DIM,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    parts.untangle(transformer.x_embedder, transformer.proj_out, torch.arange(parts.INNER_DIM))
    return diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=parts.build_image_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=transformers.CLIPTextModel(parts.build_clip_config(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=parts.build_t5_encoder(tokenizer_2),
        tokenizer_2=tokenizer_2,
    )
