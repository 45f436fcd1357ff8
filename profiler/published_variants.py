"""More published models: those that differ from another one in some entries, and those of later families."""

from __future__ import annotations

from collections.abc import Mapping

from profiler.published_parts import FLOW_MATCHING, T5_XXL, Component, PublishedModel, diffusers_part

# Qwen/Qwen2.5-VL-7B-Instruct, its language model.
_QWEN_2_5_VL = Component(
    "transformers",
    "Qwen2_5_VLTextModel",
    {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
)
# google/byt5-small, its encoder, with the colors and fonts of Glyph-SDXL-v2.
_GLYPH_BYT5 = Component(
    "transformers",
    "T5EncoderModel",
    {
        **T5_XXL.config,
        "vocab_size": 1510,
        "d_model": 1472,
        "d_ff": 3584,
        "num_layers": 12,
        "num_heads": 6,
    },
    tokenizer="ByT5",
)
# mistralai/Mistral-Small-3.2-24B-Instruct-2506: what transformers takes where a config says nothing.
_MISTRAL_SMALL = Component(
    "transformers",
    "Mistral3ForConditionalGeneration",
    {"tie_word_embeddings": False},
    # The condition is of the layers 10, 20 and 30.
    cheap={
        "text_config": {
            "model_type": "mistral",
            "hidden_size": 5120,
            "intermediate_size": 64,
            "num_hidden_layers": 30,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "vocab_size": 1024,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        },
    },
)


def variants(first: Mapping[str, PublishedModel]) -> dict[str, PublishedModel]:
    """By name, from the models that they resemble."""
    return _pictures(first) | _videos(first) | _LATER


def _pictures(first: Mapping[str, PublishedModel]) -> dict[str, PublishedModel]:
    sd3, flux = first["sd3-medium"], first["flux.1-dev"]
    transformer = sd3.components["transformer"].changed(qk_norm="rms_norm")
    return {
        "sd3.5-medium": sd3.changed(
            "huggingface.co/stabilityai/stable-diffusion-3.5-medium",
            transformer=transformer.changed(pos_embed_max_size=384, dual_attention_layers=list(range(13))),
        ),
        "sd3.5-large": sd3.changed(
            "huggingface.co/stabilityai/stable-diffusion-3.5-large",
            transformer=transformer.changed(num_layers=38, num_attention_heads=38, caption_projection_dim=2432),
        ),
        "flux.1-schnell": flux.changed(
            "huggingface.co/black-forest-labs/FLUX.1-schnell",
            transformer=flux.components["transformer"].changed(guidance_embeds=False),
            scheduler=FLOW_MATCHING.changed(shift=1.0, use_dynamic_shifting=False),
        ),
    }


def _videos(first: Mapping[str, PublishedModel]) -> dict[str, PublishedModel]:
    return _cogvideox(first["cogvideox1.5-5b"]) | _wan(first["wan2.1-14b"])


def _cogvideox(later: PublishedModel) -> dict[str, PublishedModel]:
    transformer = later.components["transformer"].changed(
        patch_size_t=None, patch_bias=True, sample_frames=49, sample_height=60, sample_width=90
    )
    scheduler = later.components["scheduler"].changed(snr_shift_scale=3.0)
    return {
        "cogvideox-2b": later.changed(
            "huggingface.co/zai-org/CogVideoX-2b",
            transformer=transformer.changed(
                num_layers=30, num_attention_heads=30, use_rotary_positional_embeddings=False
            ),
            scheduler=scheduler.changed("CogVideoXDDIMScheduler"),
            vae=later.components["vae"].changed(scaling_factor=1.15258426, invert_scale_latents=False),
        ),
        "cogvideox-5b": later.changed(
            "huggingface.co/zai-org/CogVideoX-5b",
            transformer=transformer,
            scheduler=scheduler.changed(snr_shift_scale=1.0),
            vae=later.components["vae"].changed(invert_scale_latents=False),
        ),
    }


def _wan(large: PublishedModel) -> dict[str, PublishedModel]:
    transformer, scheduler = large.components["transformer"], large.components["scheduler"]
    return {
        "wan2.1-1.3b": large.changed(
            "huggingface.co/Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            transformer=transformer.changed(num_layers=30, num_attention_heads=12, ffn_dim=8960),
            scheduler=scheduler.changed(flow_shift=3.0),
        ),
        "wan2.2-t2v-a14b": large.changed(
            "huggingface.co/Wan-AI/Wan2.2-T2V-A14B-Diffusers",
            {"boundary_ratio": 0.875},
            transformer_2=transformer,
            scheduler=scheduler.changed(flow_shift=3.0),
        ),
        "wan2.2-ti2v-5b": large.changed(
            "huggingface.co/Wan-AI/Wan2.2-TI2V-5B-Diffusers",
            {"expand_timesteps": True},
            transformer=transformer.changed(
                num_layers=30, num_attention_heads=24, ffn_dim=14336, in_channels=48, out_channels=48
            ),
            vae=large.components["vae"].changed(
                base_dim=160,
                decoder_base_dim=256,
                z_dim=48,
                is_residual=True,
                in_channels=12,
                out_channels=12,
                patch_size=2,
                scale_factor_spatial=16,
                # No shapes: the statistics of latents, 48 numbers each.
                latents_mean=[0.0] * 48,
                latents_std=[1.0] * 48,
            ),
        ),
    }


_LATER = {
    "flux.2-dev": PublishedModel(
        "Flux2Pipeline",
        {
            "transformer": diffusers_part(
                "Flux2Transformer2DModel",
                in_channels=128,
                num_layers=8,
                num_single_layers=48,
                attention_head_dim=128,
                num_attention_heads=48,
                joint_attention_dim=15360,
                guidance_embeds=True,
                axes_dims_rope=[32, 32, 32, 32],
                rope_theta=2000,
            ),
            "scheduler": FLOW_MATCHING.changed(
                shift=3.0,
                use_dynamic_shifting=True,
                base_shift=0.5,
                max_shift=1.15,
                base_image_seq_len=256,
                max_image_seq_len=4096,
            ),
            "vae": diffusers_part("AutoencoderKLFlux2", block_out_channels=[128, 256, 512, 512], latent_channels=32),
            "text_encoder": _MISTRAL_SMALL,
        },
        "huggingface.co/black-forest-labs/FLUX.2-dev",
    ),
    "hunyuanvideo-1.5": PublishedModel(
        "HunyuanVideo15Pipeline",
        {
            "transformer": diffusers_part(
                "HunyuanVideo15Transformer3DModel",
                in_channels=65,
                out_channels=32,
                num_layers=54,
                num_refiner_layers=2,
                attention_head_dim=128,
                num_attention_heads=16,
                text_embed_dim=3584,
                text_embed_2_dim=1472,
                image_embed_dim=1152,
                rope_axes_dim=[16, 56, 56],
                target_size=640,
                task_type="t2v",
            ),
            "scheduler": FLOW_MATCHING.changed(shift=5.0),
            "vae": diffusers_part(
                "AutoencoderKLHunyuanVideo15",
                block_out_channels=[128, 256, 512, 1024, 1024],
                latent_channels=32,
                scaling_factor=1.03682,
            ),
            "text_encoder": _QWEN_2_5_VL,
            "text_encoder_2": _GLYPH_BYT5,
            "guider": diffusers_part("ClassifierFreeGuidance", guidance_scale=6.0),
        },
        "huggingface.co/hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    ),
}
