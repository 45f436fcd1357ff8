"""A tiny Wan."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tridentserve.pipelines.tiny import parts


def build_pipeline() -> Any:
    """Build a Wan 2.1: cross-attention to text, rotary positions, the UniPC scheduler."""
    return diffusers.WanPipeline(**build_components())


def build_components(**changes: Any) -> dict[str, Any]:
    """Build the components. `changes` are changes to the config of the transformer."""
    tokenizer = parts.build_t5_tokenizer()
    config: dict[str, Any] = {
        "num_attention_heads": parts.HEADS,
        "attention_head_dim": parts.HEAD_DIM,
        "in_channels": parts.LATENT_CHANNELS,
        "out_channels": parts.LATENT_CHANNELS,
        "text_dim": parts.T5_DIM,
        "freq_dim": 32,
        "ffn_dim": 2 * parts.INNER_DIM,
        "num_layers": 2,
    }
    transformer = diffusers.WanTransformer3DModel(**config | changes)
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    vae = diffusers.AutoencoderKLWan(base_dim=8, z_dim=parts.LATENT_CHANNELS, num_res_blocks=1)
    parts.smooth(vae.decoder)
    return {
        "tokenizer": tokenizer,
        "text_encoder": parts.build_t5_encoder(tokenizer, transformers.UMT5Config, transformers.UMT5EncoderModel),
        "vae": vae,
        "transformer": transformer,
        "scheduler": scheduler,
    }
