"""What is known of each pipeline family without loading it: no torch here, so the API can validate early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tridentserve.requests import Shape
from tridentserve.stages import Stage

# Stretched, or scaled to cover and cropped in the middle.
ImageFit = Literal["stretch", "crop"]

_WAN_SIZE_FACTORS = (("vae", "scale_factor_spatial", 8), ("transformer", "patch_size", 2))


@dataclass(frozen=True, slots=True)
class Family:
    """One family of `diffusers` pipelines.

    `size_multiple`: height and width must be multiples of it (VAE factor times patch size).
    `size_factors`: where checkpoints differ in that, the entries of their configs whose product it is (of a list the
    last one counts), as component, key and what diffusers takes where there is none.
    `components`: the pipeline components each stage needs, by their names in `model_index.json`. A VAE that encodes
    images and decodes them belongs to two stages, each of which has one of its own.
    `optional`: those of them that a model folder may leave out.
    `shares_tokens`: whether D can run at degrees above 1 (not of U-Nets).
    `loras`: whether diffusers knows LoRAs of it.
    `negative_prompt`: whether one has an effect; guidance that is an embedding takes none.
    `takes_image`: whether every request of it starts from an image (edits, image to video); others take none.
    `image_fit`: how E brings the image to the size of the output, where it needs nothing else of it, so that this can
    be done before. None: E needs the image itself (or takes none).
    `options`: entries of `model_index.json` that are no components but settings of the pipeline.
    `frame_multiple`: for videos, whose number of frames is 1 plus a multiple of it; None where only images are made.
    `default_shape` and `default_fps`: of a video when the request names none.
    `one_size`: whether there are models of it that make one size only: the default is that size for all images that
    a video starts from. Of others it follows the image's proportions.
    """

    name: str
    pipeline_class: str
    size_multiple: int
    """Height and width must be multiples of it (VAE factor times patch size)."""
    default_steps: int
    default_guidance_scale: float
    components: Mapping[Stage, tuple[str, ...]]
    """The pipeline components that each stage needs, by their names in `model_index.json`. A VAE that encodes and
    decodes images belongs to two stages, each of which has one of its own."""
    size_factors: tuple[tuple[str, str, int], ...] = ()
    """Where model folders differ in `size_multiple`: the entries of their configs whose product it is, as component,
    key and the default of diffusers. The last entry of a list counts."""
    optional: frozenset[str] = frozenset()
    """Components that a model folder may leave out."""
    options: tuple[str, ...] = ()
    """Entries of `model_index.json` that are no components but settings of the pipeline."""
    shares_tokens: bool = True
    """D can run at degrees above 1. U-Nets cannot."""
    loras: bool = True
    """diffusers supports LoRAs of it."""
    negative_prompt: bool = True
    """A negative prompt has an effect; where guidance is an embedding it has none."""
    takes_image: bool = False
    """Every request of it starts from an image (edits, image to video); requests of other families have none."""
    image_fit: ImageFit | None = None
    """How E resizes the image to the size of the output, if it needs nothing else of it, so that this can be done
    before. None: E needs the image itself (or takes none)."""
    frame_multiple: int | None = None
    """The number of frames of a video is 1 plus a multiple of it; None where only images are made."""
    default_shape: Shape | None = None
    """Size of a video when the request names none."""
    default_fps: int | None = None
    """Frames per second of a video when the request names none."""
    one_size: bool = False
    """Some models of it make one size only, so the default size holds for all images that a video starts from. The
    default size of other families follows the image's proportions."""

    def allows_frames(self, num_frames: int) -> bool:
        """Whether an output can have this many frames."""
        if self.frame_multiple is None:
            return num_frames == 1
        return num_frames >= 1 and (num_frames - 1) % self.frame_multiple == 0


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="sd3",
            pipeline_class="StableDiffusion3Pipeline",
            size_multiple=16,
            default_steps=28,
            default_guidance_scale=7.0,
            components={
                Stage.ENCODE: (
                    "text_encoder",
                    "text_encoder_2",
                    "text_encoder_3",
                    "tokenizer",
                    "tokenizer_2",
                    "tokenizer_3",
                ),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            optional=frozenset({"text_encoder_3", "tokenizer_3"}),
        ),
        Family(
            name="flux",
            pipeline_class="FluxPipeline",
            size_multiple=16,
            default_steps=28,
            default_guidance_scale=3.5,
            components={
                Stage.ENCODE: ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            negative_prompt=False,
        ),
        Family(
            name="flux_kontext",
            pipeline_class="FluxKontextPipeline",
            size_multiple=16,
            default_steps=28,
            default_guidance_scale=2.5,
            components={
                Stage.ENCODE: ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            negative_prompt=False,
            takes_image=True,
            image_fit="stretch",
        ),
        Family(
            name="pixart_sigma",
            pipeline_class="PixArtSigmaPipeline",
            size_multiple=16,
            default_steps=20,
            default_guidance_scale=4.5,
            components={
                Stage.ENCODE: ("text_encoder", "tokenizer"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            loras=False,
        ),
        Family(
            name="qwen_image",
            pipeline_class="QwenImagePipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=4.0,
            components={
                Stage.ENCODE: ("text_encoder", "tokenizer"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
        ),
        Family(
            name="sdxl",
            pipeline_class="StableDiffusionXLPipeline",
            size_multiple=8,
            default_steps=50,
            default_guidance_scale=5.0,
            components={
                Stage.ENCODE: ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
                Stage.DIFFUSE: ("unet", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            options=("force_zeros_for_empty_prompt",),
            shares_tokens=False,
        ),
        Family(
            name="hunyuan_dit",
            pipeline_class="HunyuanDiTPipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=5.0,
            components={
                Stage.ENCODE: ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            loras=False,
        ),
        Family(
            name="flux2_klein",
            pipeline_class="Flux2KleinPipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=4.0,
            components={
                Stage.ENCODE: ("text_encoder", "tokenizer"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            options=("is_distilled",),
        ),
        Family(
            name="flux2",
            pipeline_class="Flux2Pipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=4.0,
            components={
                Stage.ENCODE: ("text_encoder", "tokenizer"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            negative_prompt=False,
        ),
        Family(
            name="cogvideox",
            pipeline_class="CogVideoXPipeline",
            size_multiple=16,
            default_steps=50,
            default_guidance_scale=6.0,
            components={
                Stage.ENCODE: ("text_encoder", "tokenizer"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
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
            components={
                Stage.ENCODE: ("text_encoder", "tokenizer", "vae"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            takes_image=True,
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
            components={
                Stage.ENCODE: ("text_encoder", "tokenizer"),
                Stage.DIFFUSE: ("transformer", "transformer_2", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            optional=frozenset({"transformer_2"}),
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
            components={
                Stage.ENCODE: ("text_encoder", "tokenizer", "image_encoder", "image_processor", "vae"),
                Stage.DIFFUSE: ("transformer", "transformer_2", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            optional=frozenset({"transformer_2", "image_encoder", "image_processor"}),
            options=("boundary_ratio", "expand_timesteps"),
            takes_image=True,
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
            components={
                Stage.ENCODE: ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            negative_prompt=False,
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
            components={
                Stage.ENCODE: ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "guider"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
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
            components={
                Stage.ENCODE: (
                    "text_encoder",
                    "text_encoder_2",
                    "tokenizer",
                    "tokenizer_2",
                    "guider",
                    "image_encoder",
                    "feature_extractor",
                    "vae",
                ),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            takes_image=True,
            image_fit="crop",
            frame_multiple=4,
            default_shape=Shape(480, 848, 121),
            default_fps=24,
            loras=False,
        ),
        Family(
            name="mochi",
            pipeline_class="MochiPipeline",
            size_multiple=16,
            default_steps=64,
            default_guidance_scale=4.5,
            components={
                Stage.ENCODE: ("text_encoder", "tokenizer"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            options=("force_zeros_for_empty_prompt",),
            frame_multiple=6,
            default_shape=Shape(480, 848, 85),
            default_fps=30,
        ),
    )
}


def family_of_pipeline(class_name: str) -> Family | None:
    """The family whose `model_index.json` holds this `_class_name`, or None."""
    return next((family for family in FAMILIES.values() if family.pipeline_class == class_name), None)
