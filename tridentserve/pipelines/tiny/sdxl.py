"""A tiny Stable Diffusion XL."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tridentserve.pipelines.tiny import parts

_CHANNELS = 4
_TIME_DIM = 8


def build_pipeline() -> Any:
    """Build an SDXL base 1.0, whose U-Net takes the size of the image as input."""
    tokenizer = parts.build_clip_tokenizer()
    unet = diffusers.UNet2DConditionModel(
        sample_size=64,
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(2, 4),
        cross_attention_dim=2 * parts.CLIP_DIM,
        use_linear_projection=True,
        norm_num_groups=8,
        addition_embed_type="text_time",
        addition_time_embed_dim=_TIME_DIM,
        projection_class_embeddings_input_dim=6 * _TIME_DIM + parts.CLIP_DIM,
    )
    return diffusers.StableDiffusionXLPipeline(
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            # The real scheduler has more noise, and the error of an untrained model grows with it.
            beta_end=0.004,
            beta_schedule="scaled_linear",
            steps_offset=1,
            timestep_spacing="leading",
        ),
        vae=parts.build_image_vae(scaling_factor=0.13025, latent_channels=_CHANNELS),
        text_encoder=transformers.CLIPTextModel(parts.build_clip_config(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=transformers.CLIPTextModelWithProjection(parts.build_clip_config(tokenizer)),
        tokenizer_2=parts.build_clip_tokenizer(),
    )
