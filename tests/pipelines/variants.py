"""Variants of the tiny models, as published models and schedulers have them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import pipelines


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _without_t5(folder: Path) -> None:
    edit_json(folder / "model_index.json", text_encoder_3=[None, None], tokenizer_3=[None, None])
    shutil.rmtree(folder / "text_encoder_3")


def replace_model(model_class: Any, component: str = "transformer", **changes: Any) -> Callable[[Path], None]:
    """Replace a model by one with random weights and a changed config."""

    def change(folder: Path) -> None:
        config = model_class.load_config(folder / component) | changes
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model_class.from_config(config).save_pretrained(folder / component)

    return change


def _with_scheduler(scheduler_class: Any, **changes: Any) -> Callable[[Path], None]:
    """Replace the scheduler by another class with a changed config."""

    def change(folder: Path) -> None:
        config = scheduler_class.load_config(folder / "scheduler")
        scheduler_class.from_config(config, **changes).save_pretrained(folder / "scheduler")
        edit_json(folder / "model_index.json", scheduler=["diffusers", scheduler_class.__name__])

    return change


def _latent_consistency(folder: Path) -> None:
    replace_model(diffusers.UNet2DConditionModel, "unet", time_cond_proj_dim=16)(folder)
    _with_scheduler(diffusers.LCMScheduler)(folder)


def _with_latent_statistics(folder: Path) -> None:
    edit_json(folder / "vae" / "config.json", latents_mean=[-1.6, 1.1, 1.5, -2.9], latents_std=[8.4, 5.9, 5.9, 2.9])


def _two_billion(folder: Path) -> None:
    """CogVideoX-2B has another scheduler than 5B, and positions that are added instead of rotary ones."""
    replace_model(diffusers.CogVideoXTransformer3DModel, use_rotary_positional_embeddings=False)(folder)
    _with_scheduler(diffusers.CogVideoXDDIMScheduler)(folder)


def _two_experts(folder: Path) -> None:
    """Wan 2.2 A14B: one transformer for the first steps, another for the rest."""
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    replace_model(diffusers.WanTransformer3DModel, "transformer_2")(folder)
    names = ["diffusers", "WanTransformer3DModel"]
    edit_json(folder / "model_index.json", transformer_2=names, boundary_ratio=0.9)


def _version_1(folder: Path, **changes: Any) -> None:
    """CogVideoX 1.0 with an input image: no pairs of frames, no offset, latents scaled as in the family without one."""
    plain: dict[str, Any] = {"patch_size_t": None, "ofs_embed_dim": None, "sample_frames": 49}
    replace_model(diffusers.CogVideoXTransformer3DModel, **plain | changes)(folder)
    edit_json(folder / "vae" / "config.json", invert_scale_latents=False)


def _learned_positions(folder: Path) -> None:
    """CogVideoX 1.0 5B with an input image makes one size only, here 96 x 64 pixels."""
    _version_1(folder, use_learned_positional_embeddings=True, sample_height=8, sample_width=12)


def _without_clip(folder: Path) -> None:
    """Wan 2.2 with an input image: two experts, which get only the image's latents."""
    shutil.rmtree(folder / "image_encoder")
    shutil.rmtree(folder / "image_processor")
    edit_json(folder / "model_index.json", image_encoder=[None, None], image_processor=[None, None])
    replace_model(diffusers.WanTransformer3DModel, image_dim=None, added_kv_proj_dim=None)(folder)


def _two_experts_from_images(folder: Path) -> None:
    _without_clip(folder)
    _two_experts(folder)


def _timestep_per_token_from_images(folder: Path) -> None:
    _without_clip(folder)
    _timestep_per_token(folder)


def _timestep_per_token(folder: Path) -> None:
    """Wan 2.2 TI2V-5B: a VAE of factor 16, a timestep for each token."""
    statistics = {"latents_mean": [0.1] * 48, "latents_std": [0.5] * 48}
    channels = {"z_dim": 48, "in_channels": 12, "out_channels": 12}
    factor = {"patch_size": 2, "scale_factor_spatial": 16, "is_residual": True}
    replace_model(diffusers.AutoencoderKLWan, "vae", **channels, **statistics, **factor)(folder)
    replace_model(diffusers.WanTransformer3DModel, in_channels=48, out_channels=48)(folder)
    edit_json(folder / "model_index.json", expand_timesteps=True)


def _version_2_0(folder: Path) -> None:
    """LTX-2.0: texts of one width for video and sound, attention without gates and modulation, a plain vocoder."""
    widths: dict[str, Any] = {f"{kind}_connector_attention_head_dim": 8 for kind in ("video", "audio")}
    connectors = dict.fromkeys(("video_gated_attn", "audio_gated_attn", "per_modality_projections", "proj_bias"), False)
    replace_model(pipelines.ltx2.LTX2TextConnectors, "connectors", **widths | connectors)(folder)
    plain: dict[str, Any] = dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn"), False)
    plain |= {"audio_cross_attn_mod": False, "perturbed_attn": False, "use_prompt_embeddings": True}
    replace_model(diffusers.LTX2VideoTransformer3DModel, **plain)(folder)
    vocoder: dict[str, Any] = {"upsample_factors": [10, 24], "upsample_kernel_sizes": [20, 48]}
    vocoder |= {"act_fn": "leaky_relu", "antialias": False, "output_sampling_rate": 24000}
    replace_model(pipelines.ltx2.LTX2Vocoder, "vocoder", **vocoder)(folder)
    edit_json(folder / "model_index.json", vocoder=["ltx2", "LTX2Vocoder"])


def keep(folder: Path) -> None:
    """The same model, for requests with several input images."""


def keep_for_one(folder: Path) -> None:
    """The same model, for requests with an input image, without which others may be."""


def keep_for_start(folder: Path) -> None:
    """The same model, for requests that start from an image."""


def keep_for_mask(folder: Path) -> None:
    """The same model, for requests that start from an image and change the part that a mask names."""


# The families whose requests may start from an image.
_STARTING = ("sd3", "flux", "qwen_image", "sdxl", "z_image")

# The changes that make each variant of a family's tiny model, as published models and schedulers have them.
CHANGES: dict[str, Callable[[Path], None]] = {
    "sd3-medium": replace_model(diffusers.SD3Transformer2DModel, dual_attention_layers=(), qk_norm=None),
    "sd3-without-t5": _without_t5,
    "sd3-shifting": _with_scheduler(diffusers.FlowMatchEulerDiscreteScheduler, use_dynamic_shifting=True),
    "sd3-stochastic": _with_scheduler(diffusers.FlowMatchEulerDiscreteScheduler, stochastic_sampling=True),
    "flux-schnell": replace_model(diffusers.FluxTransformer2DModel, guidance_embeds=False),
    "pixart_sigma-sde": _with_scheduler(diffusers.DPMSolverMultistepScheduler, algorithm_type="sde-dpmsolver++"),
    "pixart_sigma-unipc": _with_scheduler(diffusers.UniPCMultistepScheduler),
    "sdxl-ancestral": _with_scheduler(diffusers.EulerAncestralDiscreteScheduler),
    "sdxl-trailing": _with_scheduler(diffusers.EulerDiscreteScheduler, timestep_spacing="trailing"),
    "sdxl-tcd": _with_scheduler(diffusers.TCDScheduler),
    "sdxl-lcm": _latent_consistency,
    "sdxl-1.0": replace_model(diffusers.AutoencoderKL, "vae", use_quant_conv=True, use_post_quant_conv=True),
    "sdxl-playground": _with_latent_statistics,
    "hunyuan_dit-1.2": replace_model(diffusers.HunyuanDiT2DModel, use_style_cond_and_image_meta_size=False),
    "flux2_klein-distilled": lambda folder: edit_json(folder / "model_index.json", is_distilled=True),
    "qwen_image_edit_plus-2511": replace_model(diffusers.QwenImageTransformer2DModel, zero_cond_t=True),
    "qwen_image_edit_plus-images": keep,
    "flux2-images": keep,
    "flux2_klein-images": keep,
    "cogvideox-2b": _two_billion,
    "cogvideox-1.5": replace_model(diffusers.CogVideoXTransformer3DModel, patch_size_t=2, sample_frames=81),
    "cogvideox_i2v-1.0": _version_1,
    "cogvideox_i2v-learned": _learned_positions,
    "wan_i2v-2.2": _two_experts_from_images,
    "wan_i2v-2.2-ti2v": _timestep_per_token_from_images,
    "wan-flow": _with_scheduler(diffusers.FlowMatchEulerDiscreteScheduler, shift=3.0),
    "wan-2.2": _two_experts,
    "wan-2.2-ti2v": _timestep_per_token,
    "mochi-zeros": lambda folder: edit_json(folder / "model_index.json", force_zeros_for_empty_prompt=True),
    "ltx2-2.0": _version_2_0,
    "ltx2-image": keep_for_one,
    **{f"{family}-start": keep_for_start for family in _STARTING},
    **{f"{family}-mask": keep_for_mask for family in _STARTING},
    "mochi-plain": lambda folder: edit_json(folder / "vae" / "config.json", latents_mean=None, latents_std=None),
}
