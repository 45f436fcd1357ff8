"""A tiny CogVideoX."""

from __future__ import annotations

from typing import Any

import diffusers

from tridentserve.pipelines.tiny import parts

TIME_DIM = 32


def build_pipeline() -> Any:
    """Build a CogVideoX-5B: rotary positions, the DPM scheduler."""
    return assemble_pipeline(diffusers.CogVideoXPipeline)


def assemble_pipeline(pipeline_class: Any, invert_scale_latents: bool = False, **changes: Any) -> Any:
    """Assemble a pipeline. `changes` are changes to the config of the transformer of CogVideoX-5B."""
    tokenizer = parts.build_t5_tokenizer()
    config: dict[str, Any] = {
        "num_attention_heads": parts.HEADS,
        "attention_head_dim": parts.HEAD_DIM,
        "in_channels": parts.LATENT_CHANNELS,
        "out_channels": parts.LATENT_CHANNELS,
        "time_embed_dim": TIME_DIM,
        "text_embed_dim": parts.T5_DIM,
        "num_layers": 2,
        "sample_width": 90,
        "sample_height": 60,
        "sample_frames": 49,
        "use_rotary_positional_embeddings": True,
    }
    transformer = diffusers.CogVideoXTransformer3DModel(**config | changes)
    scheduler = diffusers.CogVideoXDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=1.0,
        timestep_spacing="trailing",
        set_alpha_to_one=True,
    )
    return pipeline_class(
        tokenizer=tokenizer,
        text_encoder=parts.build_t5_encoder(tokenizer),
        vae=diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 16, 16),
            latent_channels=parts.LATENT_CHANNELS,
            layers_per_block=1,
            norm_num_groups=4,
            scaling_factor=0.7,
            invert_scale_latents=invert_scale_latents,
        ),
        transformer=transformer,
        scheduler=scheduler,
    )
