"""A tiny Qwen-Image."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from tridentserve.pipelines.tiny import parts

_TEXT_DIM = 32


def build_pipeline() -> Any:
    """Build a Qwen-Image, which has no guidance embedding and so has guidance by two passes."""
    tokenizer = parts.build_qwen_tokenizer(1024)
    transformer, vae = build_transformer(), build_vae()
    # The vision model is never run, since prompts have no images.
    text_encoder = build_text_encoder(tokenizer)
    return diffusers.QwenImagePipeline(
        transformer=transformer, scheduler=build_scheduler(), vae=vae, text_encoder=text_encoder, tokenizer=tokenizer
    )


def build_scheduler() -> Any:
    """Build the scheduler of any Qwen-Image."""
    return diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02)


def build_transformer() -> Any:
    """Build the transformer of any Qwen-Image."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * parts.LATENT_CHANNELS,
        out_channels=parts.LATENT_CHANNELS,
        num_layers=2,
        num_attention_heads=parts.HEADS,
        attention_head_dim=parts.HEAD_DIM,
        joint_attention_dim=_TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
    )
    parts.untangle(model.img_in, model.proj_out, torch.arange(parts.INNER_DIM))
    return model


def build_vae() -> Any:
    """Build the VAE of any Qwen-Image."""
    model = diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=parts.LATENT_CHANNELS, num_res_blocks=1)
    parts.brighten(model.decoder.conv_out)
    return model


def build_text_encoder(tokenizer: Any, **token_ids: int) -> Any:
    """Build a Qwen2.5-VL with a small vision model. `token_ids` are those of the marks of images."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": _TEXT_DIM,
        "intermediate_size": 2 * _TEXT_DIM,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 1,
        "hidden_size": _TEXT_DIM,
        "intermediate_size": 2 * _TEXT_DIM,
        "num_heads": 2,
        "out_hidden_size": _TEXT_DIM,
        "fullatt_block_indexes": [0],
    }
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **token_ids)
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
