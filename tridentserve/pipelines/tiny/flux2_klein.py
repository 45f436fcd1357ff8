"""A tiny FLUX.2 klein."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from tridentserve.pipelines.tiny import parts

TEXT_DIM = 16
# The condition comes from the layers 9, 18 and 27.
_TEXT_LAYERS = 27


def build_pipeline() -> Any:
    """Build a FLUX.2 klein base, which is not distilled and so has guidance by two passes."""
    tokenizer = parts.build_qwen3_tokenizer()
    return diffusers.Flux2KleinPipeline(
        transformer=build_transformer(guidance_embeds=False),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=build_vae(),
        text_encoder=_build_text_encoder(tokenizer),
        tokenizer=tokenizer,
    )


def build_transformer(*, guidance_embeds: bool) -> Any:
    """Build the transformer of any FLUX.2."""
    model = diffusers.Flux2Transformer2DModel(
        in_channels=4 * parts.LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=2,
        num_attention_heads=parts.HEADS,
        attention_head_dim=parts.HEAD_DIM,
        joint_attention_dim=3 * TEXT_DIM,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )
    parts.untangle(model.x_embedder, model.proj_out, torch.arange(parts.INNER_DIM))
    for block in model.transformer_blocks:
        parts.brighten(block.attn.to_v, 8.0)
    return model


def build_vae() -> Any:
    """Build the VAE of any FLUX.2."""
    model = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=parts.LATENT_CHANNELS,
        norm_num_groups=4,
        mid_block_add_attention=False,
    )
    parts.smooth(model.decoder)
    parts.brighten(model.decoder.conv_out, 1.5)
    # Input images are about as large as noise and have an effect on the attention.
    parts.brighten(model.encoder.conv_out, 8.0)
    # Random statistics show whether a decoder undoes the normalization.
    model.bn.running_mean.normal_(std=0.5)
    model.bn.running_var.uniform_(0.5, 2.0)
    return model


def _build_text_encoder(tokenizer: Any) -> Any:
    config = parts.build_qwen3_config(tokenizer, TEXT_DIM, _TEXT_LAYERS)
    return transformers.Qwen3ForCausalLM(config).eval()
