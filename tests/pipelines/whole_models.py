"""Small model folders of pipelines that are no family, with random weights, and what their stock pipelines make."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from numpy.typing import NDArray

from tridentserve.pipelines.tiny import parts, pixart_sigma
from tridentserve.requests import GenerationInputs

_IMAGE_CHANNELS, _VIDEO_CHANNELS = 4, 8


def _build_unet() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=_IMAGE_CHANNELS,
        out_channels=_IMAGE_CHANNELS,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=parts.CLIP_DIM,
        norm_num_groups=8,
    )


def _build_stable_diffusion() -> Any:
    """Stable Diffusion 1.5, with a safety checker, and a scheduler with a step more than was asked for."""
    tokenizer = parts.build_clip_tokenizer()
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 16, "projection_dim": 16}
    checker = StableDiffusionSafetyChecker(transformers.CLIPConfig(vision_config=vision, projection_dim=16))
    return diffusers.StableDiffusionPipeline(
        unet=_build_unet(),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1, beta_end=0.004),
        vae=parts.build_image_vae(scaling_factor=0.18215, latent_channels=_IMAGE_CHANNELS),
        text_encoder=transformers.CLIPTextModel(parts.build_clip_config(tokenizer)),
        tokenizer=tokenizer,
        safety_checker=checker,
        feature_extractor=transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32),
    )


def _build_pixart_alpha() -> Any:
    """PixArt-Alpha, which has the older kind of callback, and the parts of PixArt-Sigma."""
    return diffusers.PixArtAlphaPipeline(**pixart_sigma.build_pipeline().components)


def _build_lumina() -> Any:
    """Lumina Image 2.0, whose text encoder is a language model."""
    tokenizer = transformers.GemmaTokenizer(vocab=_list_pieces(), merges=[], model_max_length=256)
    text_config = transformers.Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=0,
    )
    return diffusers.Lumina2Pipeline(
        transformer=diffusers.Lumina2Transformer2DModel(
            sample_size=16,
            in_channels=parts.LATENT_CHANNELS,
            hidden_size=48,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 6, 6),
            axes_lens=(256, 64, 64),
            cap_feat_dim=32,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=parts.build_image_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=transformers.Gemma2Model(text_config).eval(),
        tokenizer=tokenizer,
    )


def _list_pieces() -> dict[str, int]:
    letters = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", *(chr(code) for code in range(33, 127))]
    return {letter: number for number, letter in enumerate(letters)}


def _build_ltx() -> Any:
    """LTX-Video: videos of 8 k + 1 frames, sides that are multiples of 32."""
    tokenizer = parts.build_t5_tokenizer()
    tokenizer.model_max_length = 128
    return diffusers.LTXPipeline(
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=_VIDEO_CHANNELS,
            out_channels=_VIDEO_CHANNELS,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            num_layers=2,
            caption_channels=parts.T5_DIM,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=_VIDEO_CHANNELS,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        ),
        text_encoder=parts.build_t5_encoder(tokenizer),
        tokenizer=tokenizer,
    )


def _build_animate_diff() -> Any:
    """AnimateDiff, which makes its U-Net of two components: videos of any number of frames."""
    tokenizer = parts.build_clip_tokenizer()
    return diffusers.AnimateDiffPipeline(
        unet=_build_unet(),
        motion_adapter=diffusers.MotionAdapter(
            block_out_channels=(32, 64),
            motion_layers_per_block=1,
            motion_mid_block_layers_per_block=1,
            motion_num_attention_heads=2,
            motion_norm_num_groups=4,
        ),
        scheduler=diffusers.DDIMScheduler(beta_end=0.004),
        vae=parts.build_image_vae(scaling_factor=0.18215, latent_channels=_IMAGE_CHANNELS),
        text_encoder=transformers.CLIPTextModel(parts.build_clip_config(tokenizer)),
        tokenizer=tokenizer,
    )


_RECIPES: Mapping[str, Callable[[], Any]] = {
    "stable_diffusion": _build_stable_diffusion,
    "pixart_alpha": _build_pixart_alpha,
    "lumina": _build_lumina,
    "ltx": _build_ltx,
    "animate_diff": _build_animate_diff,
}
WHOLE_MODELS = tuple(_RECIPES)


def whole_folder(name: str, cache_dir: Path) -> Path:
    """The model folder of one of these pipelines, made on first use."""
    folder = cache_dir / f"whole-{name}"
    if not folder.is_dir():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _RECIPES[name]().save_pretrained(folder)
    return folder


@functools.cache
def load_whole_stock(folder: Path) -> Any:
    """The stock pipeline, as its users load it."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(folder), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_stock_pixels(folder: Path, inputs: GenerationInputs, **arguments: Any) -> NDArray[np.uint8]:
    """What the stock pipeline makes of a request, rounded as it rounds for files. `arguments` are what only this
    pipeline takes."""
    texts = {"negative_prompt": inputs.negative_prompt} if inputs.negative_prompt else {}
    made = load_whole_stock(folder)(
        prompt=inputs.prompt,
        height=inputs.shape.height,
        width=inputs.shape.width,
        num_inference_steps=inputs.num_inference_steps,
        guidance_scale=inputs.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(inputs.seed),
        **texts,
        **arguments,
    )[0]
    return np.stack([np.stack(each) if isinstance(each, list) else np.asarray(each) for each in made])
