"""The published configurations of real models: what a full-size model is, without its weights. No torch here.

A `PublishedModel` has the entries of `model_index.json` and of each component's `config.json` in the repository that
`source` names (revisions of 2024 and 2025); entries that only say where a file was made are left out. The sizes that
follow of them are checked in `tests/profiler/test_published.py` against the models' papers and cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tridentserve.errors import ProfileError


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a pipeline: the class that makes it, by library and name, and its `config.json`."""

    library: str
    class_name: str
    config: Mapping[str, Any]

    def changed(self, class_name: str | None = None, **changes: Any) -> Component:
        """The same with another class, or with some entries changed."""
        return Component(self.library, class_name or self.class_name, {**self.config, **changes})


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A pipeline of `diffusers` as its authors published it. Tokenizers are not here: vocabularies are no shapes."""

    pipeline_class: str
    components: Mapping[str, Component]
    source: str


# openai/clip-vit-large-patch14 and laion/CLIP-ViT-bigG-14, their text models.
_CLIP_L = Component(
    "transformers",
    "CLIPTextModel",
    {
        "vocab_size": 49408,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "projection_dim": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    },
)
_CLIP_L_PROJECTED = _CLIP_L.changed("CLIPTextModelWithProjection")
_CLIP_BIG_G = _CLIP_L_PROJECTED.changed(
    hidden_size=1280,
    intermediate_size=5120,
    projection_dim=1280,
    num_hidden_layers=32,
    num_attention_heads=20,
    hidden_act="gelu",
)
# google/t5-v1_1-xxl and google/umt5-xxl, their encoders.
_T5_XXL = Component(
    "transformers",
    "T5EncoderModel",
    {
        "vocab_size": 32128,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
)
_UMT5_XXL = _T5_XXL.changed("UMT5EncoderModel", vocab_size=256384)
# xtuner/llava-llama-3-8b, its language model.
_LLAMA_3_8B = Component(
    "transformers",
    "LlamaModel",
    {
        "vocab_size": 128320,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "pad_token_id": 128258,
    },
)
_IMAGE_VAE = Component(
    "diffusers",
    "AutoencoderKL",
    {
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "latent_channels": 16,
        "norm_num_groups": 32,
        "sample_size": 1024,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "mid_block_add_attention": True,
    },
)
_FLOW_MATCHING = Component("diffusers", "FlowMatchEulerDiscreteScheduler", {"num_train_timesteps": 1000})


def _diffusers(class_name: str, **config: Any) -> Component:
    return Component("diffusers", class_name, config)


PUBLISHED: dict[str, PublishedModel] = {
    "sd3-medium": PublishedModel(
        "StableDiffusion3Pipeline",
        {
            "transformer": _diffusers(
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
            "scheduler": _FLOW_MATCHING.changed(shift=3.0),
            "vae": _IMAGE_VAE.changed(scaling_factor=1.5305, shift_factor=0.0609),
            "text_encoder": _CLIP_L_PROJECTED,
            "text_encoder_2": _CLIP_BIG_G,
            "text_encoder_3": _T5_XXL,
        },
        "huggingface.co/stabilityai/stable-diffusion-3-medium-diffusers",
    ),
    "flux.1-dev": PublishedModel(
        "FluxPipeline",
        {
            "transformer": _diffusers(
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
            "scheduler": _FLOW_MATCHING.changed(
                shift=3.0,
                use_dynamic_shifting=True,
                base_shift=0.5,
                max_shift=1.15,
                base_image_seq_len=256,
                max_image_seq_len=4096,
            ),
            "vae": _IMAGE_VAE.changed(scaling_factor=0.3611, shift_factor=0.1159),
            "text_encoder": _CLIP_L,
            "text_encoder_2": _T5_XXL,
        },
        "huggingface.co/black-forest-labs/FLUX.1-dev",
    ),
    "cogvideox1.5-5b": PublishedModel(
        "CogVideoXPipeline",
        {
            "transformer": _diffusers(
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
            "scheduler": _diffusers(
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
            "vae": _diffusers(
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
            "text_encoder": _T5_XXL,
        },
        "huggingface.co/zai-org/CogVideoX1.5-5B",
    ),
    "hunyuanvideo": PublishedModel(
        "HunyuanVideoPipeline",
        {
            "transformer": _diffusers(
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
            "scheduler": _FLOW_MATCHING.changed(shift=7.0),
            "vae": _diffusers(
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
            "text_encoder": _LLAMA_3_8B,
            "text_encoder_2": _CLIP_L,
        },
        "huggingface.co/hunyuanvideo-community/HunyuanVideo",
    ),
    "wan2.1-14b": PublishedModel(
        "WanPipeline",
        {
            "transformer": _diffusers(
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
            "scheduler": _diffusers(
                "UniPCMultistepScheduler", prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
            ),
            "vae": _diffusers(
                "AutoencoderKLWan",
                base_dim=96,
                z_dim=16,
                dim_mult=[1, 2, 4, 4],
                num_res_blocks=2,
                temperal_downsample=[False, True, True],
            ),
            "text_encoder": _UMT5_XXL,
        },
        "huggingface.co/Wan-AI/Wan2.1-T2V-14B-Diffusers",
    ),
}


def published_model(name: str) -> PublishedModel:
    """By its name here. Raises `ProfileError`, with the names there are, when there is none of this name."""
    if name not in PUBLISHED:
        raise ProfileError(f"no published configuration is known of {name!r}; there are: {', '.join(PUBLISHED)}")
    return PUBLISHED[name]
