"""Published models of the other families, from SDXL to Mochi. No torch here."""

from __future__ import annotations

from profiler.published.encoders import (
    CHINESE_ROBERTA,
    CLIP_BIG_G,
    CLIP_L,
    GLYPH_BYT5,
    MISTRAL_SMALL,
    MT5_XL,
    QWEN_2_5_VL,
    QWEN_2_5_VL_TEXT,
    QWEN_3_4B,
    QWEN_3_8B,
    T5_XXL,
)
from profiler.published.parts import (
    FLOW_MATCHING,
    SDXL_VAE,
    SHIFTED_FLOW_MATCHING,
    Component,
    PublishedModel,
    diffusers_part,
)

_FLUX_2 = PublishedModel(
    "Flux2Pipeline",
    {
        "transformer": diffusers_part("Flux2Transformer2DModel"),
        "scheduler": SHIFTED_FLOW_MATCHING.changed(shift=3.0),
        "vae": diffusers_part("AutoencoderKLFlux2"),
        "text_encoder": MISTRAL_SMALL,
    },
    "huggingface.co/black-forest-labs/FLUX.2-dev",
)


def _klein(
    size: str, text_encoder: Component, layers: int, single_layers: int, heads: int, width: int
) -> PublishedModel:
    """As scripts/convert_flux2_to_diffusers.py of diffusers has it. `width`: of the condition, three layers' together.
    The distilled one, without guidance; the base models of the same size run twice per step."""
    transformer = _FLUX_2.components["transformer"].changed(
        num_layers=layers,
        num_single_layers=single_layers,
        num_attention_heads=heads,
        joint_attention_dim=width,
        guidance_embeds=False,
    )
    components = {**_FLUX_2.components, "transformer": transformer, "text_encoder": text_encoder}
    source = f"huggingface.co/black-forest-labs/FLUX.2-klein-{size}"
    return PublishedModel("Flux2KleinPipeline", components, source, {"is_distilled": True})


OTHERS = {
    "sdxl-base-1.0": PublishedModel(
        "StableDiffusionXLPipeline",
        {
            "unet": diffusers_part(
                "UNet2DConditionModel",
                sample_size=128,
                block_out_channels=[320, 640, 1280],
                down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
                transformer_layers_per_block=[1, 2, 10],
                attention_head_dim=[5, 10, 20],
                cross_attention_dim=2048,
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=256,
                projection_class_embeddings_input_dim=2816,
            ),
            "scheduler": diffusers_part(
                "EulerDiscreteScheduler",
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                steps_offset=1,
                timestep_spacing="leading",
            ),
            "vae": SDXL_VAE,
            "text_encoder": CLIP_L,
            "text_encoder_2": CLIP_BIG_G,
        },
        "huggingface.co/stabilityai/stable-diffusion-xl-base-1.0",
        {"force_zeros_for_empty_prompt": True},
    ),
    "pixart-sigma-1024": PublishedModel(
        "PixArtSigmaPipeline",
        {
            "transformer": diffusers_part(
                "PixArtTransformer2DModel",
                caption_channels=4096,
                interpolation_scale=2,
                use_additional_conditions=False,
            ),
            "scheduler": diffusers_part("DPMSolverMultistepScheduler"),
            "vae": SDXL_VAE,
            "text_encoder": T5_XXL,
        },
        "huggingface.co/PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
    ),
    "hunyuandit-1.2": PublishedModel(
        "HunyuanDiTPipeline",
        {
            "transformer": diffusers_part(
                "HunyuanDiT2DModel",
                in_channels=4,
                patch_size=2,
                sample_size=128,
                hidden_size=1408,
                num_layers=40,
                mlp_ratio=4.3637,
                use_style_cond_and_image_meta_size=False,
            ),
            "scheduler": diffusers_part(
                "DDPMScheduler",
                beta_start=0.00085,
                beta_end=0.018,
                beta_schedule="scaled_linear",
                clip_sample=False,
                prediction_type="v_prediction",
                steps_offset=1,
            ),
            "vae": SDXL_VAE,
            "text_encoder": CHINESE_ROBERTA,
            "text_encoder_2": MT5_XL,
        },
        "huggingface.co/Tencent-Hunyuan/HunyuanDiT-v1.2-Diffusers",
    ),
    "qwen-image": PublishedModel(
        "QwenImagePipeline",
        {
            "transformer": diffusers_part("QwenImageTransformer2DModel"),
            "scheduler": SHIFTED_FLOW_MATCHING.changed(max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02),
            "vae": diffusers_part("AutoencoderKLQwenImage"),
            "text_encoder": QWEN_2_5_VL,
        },
        "huggingface.co/Qwen/Qwen-Image",
    ),
    "flux.2-dev": _FLUX_2,
    "flux.2-klein-4b": _klein("4B", QWEN_3_4B, layers=5, single_layers=20, heads=24, width=7680),
    "flux.2-klein-9b": _klein("9B", QWEN_3_8B, layers=8, single_layers=24, heads=32, width=12288),
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
            "text_encoder": QWEN_2_5_VL_TEXT,
            "text_encoder_2": GLYPH_BYT5,
            "guider": diffusers_part("ClassifierFreeGuidance", guidance_scale=6.0),
        },
        "huggingface.co/hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    ),
    "mochi-1": PublishedModel(
        "MochiPipeline",
        {
            "transformer": diffusers_part("MochiTransformer3DModel"),
            "scheduler": FLOW_MATCHING.changed(invert_sigmas=True),
            "vae": diffusers_part("AutoencoderKLMochi"),
            "text_encoder": T5_XXL,
        },
        "huggingface.co/genmo/mochi-1-preview",
    ),
}
