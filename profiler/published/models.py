"""The published configurations of real models: what a full-size model is, without its weights. No torch here.

A `PublishedModel` has the entries of `model_index.json` and of each component's `config.json` in the repository that
`source` names (revisions of 2024 and 2025); entries that only say where a file was made are left out. The sizes that
follow of them are checked in `tests/profiler/published/test_published.py` against the models' papers and cards.
"""

from __future__ import annotations

from profiler.published.encoders import CLIP_BIG_G, CLIP_L, CLIP_L_PROJECTED, LLAMA_3_8B, T5_XXL, UMT5_XXL
from profiler.published.from_images import from_pictures
from profiler.published.others import OTHERS
from profiler.published.parts import (
    FLOW_MATCHING,
    IMAGE_VAE,
    SHIFTED_FLOW_MATCHING,
    PublishedModel,
    diffusers_part,
)
from profiler.published.variants import variants
from tridentserve.errors import ProfileError

_FIRST: dict[str, PublishedModel] = {
    "sd3-medium": PublishedModel(
        "StableDiffusion3Pipeline",
        {
            "transformer": diffusers_part(
                "SD3Transformer2DModel",
                sample_size=128,
                patch_size=2,
                in_channels=16,
                out_channels=16,
                num_layers=24,
                attention_head_dim=64,
                num_attention_heads=24,
                joint_attention_dim=4096,
                caption_projection_dim=1536,
                pooled_projection_dim=2048,
                pos_embed_max_size=192,
            ),
            "scheduler": FLOW_MATCHING.changed(shift=3.0),
            "vae": IMAGE_VAE.changed(scaling_factor=1.5305, shift_factor=0.0609),
            "text_encoder": CLIP_L_PROJECTED,
            "text_encoder_2": CLIP_BIG_G,
            "text_encoder_3": T5_XXL,
        },
        "huggingface.co/stabilityai/stable-diffusion-3-medium-diffusers",
    ),
    "flux.1-dev": PublishedModel(
        "FluxPipeline",
        {
            "transformer": diffusers_part(
                "FluxTransformer2DModel",
                patch_size=1,
                in_channels=64,
                num_layers=19,
                num_single_layers=38,
                attention_head_dim=128,
                num_attention_heads=24,
                joint_attention_dim=4096,
                pooled_projection_dim=768,
                guidance_embeds=True,
                axes_dims_rope=[16, 56, 56],
            ),
            "scheduler": SHIFTED_FLOW_MATCHING.changed(shift=3.0),
            "vae": IMAGE_VAE.changed(scaling_factor=0.3611, shift_factor=0.1159),
            "text_encoder": CLIP_L,
            "text_encoder_2": T5_XXL,
        },
        "huggingface.co/black-forest-labs/FLUX.1-dev",
    ),
    "cogvideox1.5-5b": PublishedModel(
        "CogVideoXPipeline",
        {
            "transformer": diffusers_part(
                "CogVideoXTransformer3DModel",
                in_channels=16,
                out_channels=16,
                num_layers=42,
                attention_head_dim=64,
                num_attention_heads=48,
                text_embed_dim=4096,
                time_embed_dim=512,
                max_text_seq_length=226,
                patch_size=2,
                patch_size_t=2,
                patch_bias=False,
                sample_frames=81,
                sample_height=300,
                sample_width=300,
                spatial_interpolation_scale=1.875,
                temporal_interpolation_scale=1.0,
                temporal_compression_ratio=4,
                use_rotary_positional_embeddings=True,
                use_learned_positional_embeddings=False,
            ),
            "scheduler": diffusers_part(
                "CogVideoXDPMScheduler",
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                prediction_type="v_prediction",
                rescale_betas_zero_snr=True,
                snr_shift_scale=1.0,
                timestep_spacing="trailing",
                set_alpha_to_one=True,
            ),
            "vae": diffusers_part(
                "AutoencoderKLCogVideoX",
                block_out_channels=[128, 256, 256, 512],
                latent_channels=16,
                layers_per_block=3,
                norm_num_groups=32,
                temporal_compression_ratio=4,
                sample_height=480,
                sample_width=720,
                scaling_factor=0.7,
                invert_scale_latents=True,
            ),
            "text_encoder": T5_XXL,
        },
        "huggingface.co/zai-org/CogVideoX1.5-5B",
    ),
    "hunyuanvideo": PublishedModel(
        "HunyuanVideoPipeline",
        {
            "transformer": diffusers_part(
                "HunyuanVideoTransformer3DModel",
                in_channels=16,
                out_channels=16,
                num_layers=20,
                num_single_layers=40,
                num_refiner_layers=2,
                attention_head_dim=128,
                num_attention_heads=24,
                mlp_ratio=4.0,
                patch_size=2,
                patch_size_t=1,
                qk_norm="rms_norm",
                guidance_embeds=True,
                text_embed_dim=4096,
                pooled_projection_dim=768,
                rope_theta=256.0,
                rope_axes_dim=[16, 56, 56],
            ),
            "scheduler": FLOW_MATCHING.changed(shift=7.0),
            "vae": diffusers_part(
                "AutoencoderKLHunyuanVideo",
                block_out_channels=[128, 256, 512, 512],
                latent_channels=16,
                layers_per_block=2,
                norm_num_groups=32,
                scaling_factor=0.476986,
                spatial_compression_ratio=8,
                temporal_compression_ratio=4,
                mid_block_add_attention=True,
            ),
            "text_encoder": LLAMA_3_8B,
            "text_encoder_2": CLIP_L,
        },
        "huggingface.co/hunyuanvideo-community/HunyuanVideo",
    ),
    "wan2.1-14b": PublishedModel(
        "WanPipeline",
        {
            "transformer": diffusers_part(
                "WanTransformer3DModel",
                in_channels=16,
                out_channels=16,
                num_layers=40,
                attention_head_dim=128,
                num_attention_heads=40,
                ffn_dim=13824,
                freq_dim=256,
                text_dim=4096,
                patch_size=[1, 2, 2],
                cross_attn_norm=True,
                qk_norm="rms_norm_across_heads",
                eps=1e-6,
                rope_max_seq_len=1024,
            ),
            "scheduler": diffusers_part(
                "UniPCMultistepScheduler", prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
            ),
            "vae": diffusers_part(
                "AutoencoderKLWan",
                base_dim=96,
                z_dim=16,
                dim_mult=[1, 2, 4, 4],
                num_res_blocks=2,
                temperal_downsample=[False, True, True],
            ),
            "text_encoder": UMT5_XXL,
        },
        "huggingface.co/Wan-AI/Wan2.1-T2V-14B-Diffusers",
    ),
}

_FROM_TEXT = _FIRST | variants(_FIRST) | OTHERS
PUBLISHED: dict[str, PublishedModel] = _FROM_TEXT | from_pictures(_FROM_TEXT)


def published_model(name: str) -> PublishedModel:
    """By its name here. Raises `ProfileError`, with the names there are, when there is none of this name."""
    if name not in PUBLISHED:
        raise ProfileError(f"no published configuration is known of {name!r}; there are: {', '.join(PUBLISHED)}")
    return PUBLISHED[name]
