"""The table of all pipeline families. This module does not import torch, so the API can validate requests early."""

from __future__ import annotations

from collections.abc import Mapping

from tridentserve.models.family import Family, StartRules
from tridentserve.models.number_formats import VAE, NumberFormat
from tridentserve.requests import Shape
from tridentserve.stages import Stage

# What FLUX.2 and Qwen-Image-Edit scale input images to.
MEGAPIXEL = 1024 * 1024
# Classes that model folders may name for a family whose requests may have an image, with the class of the family.
_SAME_COMPONENTS = {"LTX2ImageToVideoPipeline": "LTX2Pipeline"}
_WAN_FIELDS = frozenset({"guidance_scale_2", "flow_shift"})
_WAN_SIZE_FACTORS = (("vae", "scale_factor_spatial", 8), ("transformer", "patch_size", 2))


def _list_components(
    *encode: str, diffuse: tuple[str, ...] = ("transformer", "scheduler"), sound: tuple[str, ...] = ()
) -> Mapping[Stage, tuple[str, ...]]:
    """The components of each stage; stage C needs the VAE and, for videos with sound, the components of that."""
    return {Stage.ENCODE: encode, Stage.DIFFUSE: diffuse, Stage.DECODE: (VAE, *sound)}


def _load_in(number_format: NumberFormat, *components: str) -> Mapping[str, NumberFormat]:
    """A recipe that loads these components in this number format."""
    return dict.fromkeys(components, number_format)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="sd3",
            pipeline_class="StableDiffusion3Pipeline",
            size_multiple=16,
            default_steps=28,
            default_guidance_scale=7.0,
            components=_list_components(
                "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3"
            ),
            optional=frozenset({"text_encoder_3", "tokenizer_3"}),
            packs_sizes=True,
            image_start=StartRules(),
        ),
        Family(
            name="flux",
            pipeline_class="FluxPipeline",
            size_multiple=16,
            default_steps=28,
            default_guidance_scale=3.5,
            components=_list_components("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
            negative_prompt=False,
            packs_sizes=True,
            image_start=StartRules(),
        ),
        Family(
            name="flux_kontext",
            pipeline_class="FluxKontextPipeline",
            size_multiple=16,
            default_steps=28,
            default_guidance_scale=2.5,
            components=_list_components("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae"),
            negative_prompt=False,
            min_images=1,
            max_images=1,
            image_tokens=True,
            image_fit="stretch",
        ),
        Family(
            name="flux_fill",
            pipeline_class="FluxFillPipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=30.0,
            components=_list_components("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae"),
            negative_prompt=False,
            min_images=1,
            max_images=1,
            image_fit="stretch",
            takes_mask=True,
        ),
        Family(
            name="pixart_sigma",
            pipeline_class="PixArtSigmaPipeline",
            size_multiple=16,
            default_steps=20,
            default_guidance_scale=4.5,
            components=_list_components("text_encoder", "tokenizer"),
            number_formats=_load_in("float16", "text_encoder", "transformer", VAE),
            loras=False,
        ),
        Family(
            name="qwen_image",
            pipeline_class="QwenImagePipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=4.0,
            own_fields=frozenset({"true_cfg_scale"}),
            components=_list_components("text_encoder", "tokenizer"),
            image_start=StartRules(),
        ),
        *(
            Family(
                name=name,
                pipeline_class=pipeline_class,
                size_multiple=16,
                default_steps=50,
                default_guidance_scale=4.0,
                own_fields=frozenset({"true_cfg_scale"}),
                components=_list_components("text_encoder", "processor", "vae"),
                min_images=1,
                max_images=max_images,
                image_tokens=True,
                image_pixels=MEGAPIXEL,
            )
            for name, pipeline_class, max_images in (
                ("qwen_image_edit", "QwenImageEditPipeline", 1),
                ("qwen_image_edit_plus", "QwenImageEditPlusPipeline", 3),
            )
        ),
        Family(
            name="sdxl",
            pipeline_class="StableDiffusionXLPipeline",
            size_multiple=8,
            default_steps=50,
            default_guidance_scale=5.0,
            components=_list_components(
                "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", diffuse=("unet", "scheduler")
            ),
            number_formats=_load_in("float16", "text_encoder", "text_encoder_2", "unet", VAE),
            upcasts_vae=True,
            options=("force_zeros_for_empty_prompt",),
            shares_tokens=False,
            caches_patches=True,
            packs_sizes=True,
            image_start=StartRules(strength=0.3, masked_strength=0.9999, rounds_down=True),
        ),
        Family(
            name="hunyuan_dit",
            pipeline_class="HunyuanDiTPipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=5.0,
            components=_list_components("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
            number_formats=_load_in("float16", "text_encoder", "text_encoder_2", "transformer", VAE),
            loras=False,
            caches_steps=False,
        ),
        *(
            Family(
                name=name,
                pipeline_class=pipeline_class,
                size_multiple=16,
                default_steps=50,
                default_guidance_scale=4.0,
                components=_list_components("text_encoder", "tokenizer", "vae"),
                options=("is_distilled",) if is_klein else (),
                negative_prompt=is_klein,
                max_images=max_images,
                image_tokens=True,
                image_pixels=MEGAPIXEL,
                min_image_side=64,
                max_image_proportion=8,
                image_fit="area",
            )
            for name, pipeline_class, is_klein, max_images in (
                ("flux2_klein", "Flux2KleinPipeline", True, 4),
                ("flux2", "Flux2Pipeline", False, 10),
            )
        ),
        Family(
            name="z_image",
            pipeline_class="ZImagePipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=5.0,
            components=_list_components("text_encoder", "tokenizer"),
            unguided_scale=0.0,
            image_start=StartRules(masked_strength=1.0),
        ),
        Family(
            name="cogvideox",
            pipeline_class="CogVideoXPipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=6.0,
            components=_list_components("text_encoder", "tokenizer"),
            frame_multiple=8,
            default_shape=Shape(480, 720, 49),
            default_fps=8,
        ),
        Family(
            name="cogvideox_i2v",
            pipeline_class="CogVideoXImageToVideoPipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=6.0,
            components=_list_components("text_encoder", "tokenizer", "vae"),
            min_images=1,
            max_images=1,
            image_fit="stretch",
            one_size=True,
            frame_multiple=8,
            default_shape=Shape(480, 720, 49),
            default_fps=8,
        ),
        Family(
            name="wan",
            pipeline_class="WanPipeline",
            size_multiple=16,
            size_factors=_WAN_SIZE_FACTORS,
            default_steps=50,
            default_guidance_scale=5.0,
            components=_list_components(
                "text_encoder", "tokenizer", diffuse=("transformer", "transformer_2", "scheduler")
            ),
            number_formats=_load_in("float32", VAE),
            own_fields=_WAN_FIELDS,
            optional=frozenset({"transformer_2"}),
            packs_sizes=True,
            options=("boundary_ratio", "expand_timesteps"),
            frame_multiple=4,
            default_shape=Shape(480, 832, 81),
            default_fps=16,
        ),
        Family(
            name="wan_i2v",
            pipeline_class="WanImageToVideoPipeline",
            size_multiple=16,
            size_factors=_WAN_SIZE_FACTORS,
            default_steps=50,
            default_guidance_scale=5.0,
            components=_list_components(
                "text_encoder",
                "tokenizer",
                "image_encoder",
                "image_processor",
                "vae",
                diffuse=("transformer", "transformer_2", "scheduler"),
            ),
            number_formats=_load_in("float32", "image_encoder", VAE),
            own_fields=_WAN_FIELDS,
            optional=frozenset({"transformer_2", "image_encoder", "image_processor"}),
            options=("boundary_ratio", "expand_timesteps"),
            min_images=1,
            max_images=1,
            frame_multiple=4,
            default_shape=Shape(480, 832, 81),
            default_fps=16,
        ),
        Family(
            name="hunyuan_video",
            pipeline_class="HunyuanVideoPipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=6.0,
            components=_list_components("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
            number_formats=_load_in("float16", "text_encoder", "text_encoder_2", VAE),
            negative_prompt=False,
            own_fields=frozenset({"flow_shift"}),
            frame_multiple=4,
            default_shape=Shape(720, 1280, 129),
            default_fps=24,
        ),
        Family(
            name="hunyuan_video_15",
            pipeline_class="HunyuanVideo15Pipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=6.0,
            components=_list_components("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "guider"),
            own_fields=frozenset({"flow_shift"}),
            frame_multiple=4,
            default_shape=Shape(480, 848, 121),
            default_fps=24,
            loras=False,
        ),
        Family(
            name="hunyuan_video_15_i2v",
            pipeline_class="HunyuanVideo15ImageToVideoPipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=6.0,
            components=_list_components(
                "text_encoder",
                "text_encoder_2",
                "tokenizer",
                "tokenizer_2",
                "guider",
                "image_encoder",
                "feature_extractor",
                "vae",
            ),
            min_images=1,
            max_images=1,
            image_fit="crop",
            own_fields=frozenset({"flow_shift"}),
            frame_multiple=4,
            default_shape=Shape(480, 848, 121),
            default_fps=24,
            loras=False,
        ),
        Family(
            name="ltx2",
            pipeline_class="LTX2Pipeline",
            size_multiple=32,
            default_steps=30,
            default_guidance_scale=3.0,
            components=_list_components(
                "text_encoder", "tokenizer", "connectors", "vae", sound=("audio_vae", "vocoder")
            ),
            max_images=1,
            min_image_side=2,
            frame_multiple=8,
            default_shape=Shape(512, 768, 121),
            default_fps=24,
            caches_steps=False,
        ),
        Family(
            name="mochi",
            pipeline_class="MochiPipeline",
            size_multiple=16,
            default_steps=64,
            default_guidance_scale=4.5,
            components=_list_components("text_encoder", "tokenizer"),
            options=("force_zeros_for_empty_prompt",),
            frame_multiple=6,
            default_shape=Shape(480, 848, 85),
            default_fps=30,
        ),
    )
}


def find_family(class_name: str) -> Family | None:
    """Find the family whose `model_index.json` holds this `_class_name`. None where no family does."""
    class_name = _SAME_COMPONENTS.get(class_name, class_name)
    return next((family for family in FAMILIES.values() if family.pipeline_class == class_name), None)
