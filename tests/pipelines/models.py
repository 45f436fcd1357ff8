"""Model folders for the tests, and the stock pipelines to compare with."""

from __future__ import annotations

import functools
import io
import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

from tests.pipelines.variants import CHANGES, keep, keep_for_mask, keep_for_one, keep_for_start
from tridentserve.models.families import FAMILIES
from tridentserve.models.family import Family
from tridentserve.models.input_image import open_input_image, open_input_images, open_mask
from tridentserve.models.model_folder import detect_family, read_family
from tridentserve.models.number_formats import NumberFormat, NumberFormats, find_computing_format, find_formats
from tridentserve.pipelines import DenoisingState, PipelineAdapter, load_adapter
from tridentserve.pipelines.processors import load_image_text_processor
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import GenerationInputs, ImageStart, Shape
from tridentserve.stages import Stage

torch.set_num_threads(1)

QUICK = ("sd3", "flux", "wan")
IMAGES = (
    "sd3",
    "flux",
    "flux_kontext",
    "flux_fill",
    "pixart_sigma",
    "qwen_image",
    "qwen_image_edit",
    "qwen_image_edit_plus",
    "sdxl",
    "hunyuan_dit",
    "flux2_klein",
    "flux2",
    "z_image",
)
VIDEOS = (
    "cogvideox",
    "cogvideox_i2v",
    "wan",
    "wan_i2v",
    "hunyuan_video",
    "hunyuan_video_15",
    "hunyuan_video_15_i2v",
    "mochi",
    "ltx2",
)
ALL = (*IMAGES, *VIDEOS)
# The families whose requests start from an image.
FROM_IMAGES = tuple(name for name in ALL if FAMILIES[name].needs_image)
# A model of each family whose published recipe is not the common number format. The stock pipeline of SDXL needs
# a layer of the published VAE then.
PUBLISHED = tuple("sdxl-1.0" if name == "sdxl" else name for name in ALL if FAMILIES[name].number_formats)
# The families that several workers can denoise together.
PARALLEL = tuple(name for name in ALL if FAMILIES[name].shares_tokens)


def families(*variants: str, quick: Collection[str] = QUICK) -> list[Any]:
    """Parameters of a test: all of them with the marker `families`, and those of `quick` in every run as well."""
    marks = {variant: [pytest.mark.families] for variant in variants}
    for variant in variants:
        if variant in quick:
            marks[variant].append(pytest.mark.quick)
        if family_of(variant).name == "mochi":
            # The stock transformer asks for float32 positions by way of autocast, which is not for that on a CPU.
            marks[variant].append(pytest.mark.filterwarnings("ignore:In CPU autocast"))
    return [pytest.param(variant, marks=marks[variant]) for variant in variants]


def family_of(variant: str) -> Family:
    return FAMILIES[variant.split("-")[0]]


def model_folder(variant: str, cache_dir: Path) -> Path:
    """The model folder of a variant, made on first use."""
    tiny = ensure_tiny(family_of(variant).name, cache_dir)
    if variant not in CHANGES:
        return tiny
    folder = cache_dir / variant
    if not folder.is_dir():
        shutil.copytree(tiny, folder)
        CHANGES[variant](folder)
    return folder


# Stock pipelines do not give flow matching schedulers the request's generator: with noise at each step they give
# something else each time. The others do not make all sizes of the tests.
_APART = ("sd3-stochastic", "wan-2.2-ti2v", "wan_i2v-2.2-ti2v", "cogvideox_i2v-learned")
# Their requests have several input images.
WITH_IMAGES = tuple(variant for variant, change in CHANGES.items() if change is keep)
# Theirs have one, which is optional.
WITH_ONE_IMAGE = tuple(variant for variant, change in CHANGES.items() if change is keep_for_one)
# Theirs start from an image; those of the latter change a part of it.
WITH_MASK = tuple(variant for variant, change in CHANGES.items() if change is keep_for_mask)
STARTING = (*(variant for variant, change in CHANGES.items() if change is keep_for_start), *WITH_MASK)
# The stock pipelines for such requests, without and with a mask.
STARTING_PIPELINES = {
    "sd3": (diffusers.StableDiffusion3Img2ImgPipeline, diffusers.StableDiffusion3InpaintPipeline),
    "flux": (diffusers.FluxImg2ImgPipeline, diffusers.FluxInpaintPipeline),
    "qwen_image": (diffusers.QwenImageImg2ImgPipeline, diffusers.QwenImageInpaintPipeline),
    "sdxl": (diffusers.StableDiffusionXLImg2ImgPipeline, diffusers.StableDiffusionXLInpaintPipeline),
    "z_image": (diffusers.ZImageImg2ImgPipeline, diffusers.ZImageInpaintPipeline),
}
VARIANTS = (*ALL, *(variant for variant in CHANGES if variant not in _APART))


def make_inputs(
    height: int = 64, width: int = 96, steps: int = 3, *, variant: str = "sd3", **changes: Any
) -> GenerationInputs:
    """A request to a model. A video has the lowest number of frames above one, and an image is added where one is
    needed, in the output's proportions where the stock pipeline keeps those of the image."""
    num_frames = changes.pop("num_frames", (family_of(variant).frame_multiple or 0) + 1)
    if family_of(variant).needs_image:
        size = (5 * height // 4, 5 * width // 4) if family_of(variant).image_pixels else ()
        changes.setdefault("image", make_image(0, *size))
    # Where a token is 32 x 32 pixels, the output is twice as wide and high: it has as many tokens.
    factor = max(family_of(variant).size_multiple // 16, 1)
    if family_of(variant).takes_mask:
        changes.setdefault("mask", make_mask())
    if variant in WITH_IMAGES:
        changes = {"image": make_image(0, 70, 100), "more_images": (make_image(1, 120, 66),)} | changes
    if variant in WITH_ONE_IMAGE:
        changes.setdefault("image", make_image())
    if variant in STARTING:
        changes = make_start(variant in WITH_MASK, rounds_down=variant.startswith("sdxl")) | changes
    arguments: dict[str, Any] = {
        "prompt": "a lighthouse in a storm",
        "negative_prompt": "fog",
        "guidance_scale": 4.0,
        "seed": 7,
        "shape": Shape(factor * height, factor * width, num_frames),
        "num_inference_steps": steps,
    }
    return GenerationInputs(**(arguments | changes))


def make_start(has_mask: bool, strength: float = 0.6, rounds_down: bool = False) -> dict[str, Any]:
    """The inputs of a request that starts from an image."""
    start = ImageStart(strength, has_mask, rounds_down)
    return {"image": make_image(), "mask": make_mask() if has_mask else None, "start": start}


@functools.cache
def make_image(seed: int = 0, height: int = 52, width: int = 70) -> bytes:
    """A PNG file with a few soft colours, in a size that no output has."""
    colours = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(colours).resize((width, height), Image.Resampling.BILINEAR).save(buffer, format="PNG")
    return buffer.getvalue()


@functools.cache
def make_mask(height: int = 52, width: int = 70) -> bytes:
    """A PNG file with a white disc on black, soft at its edge."""
    rows, columns = np.mgrid[:height, :width]
    distance = np.hypot(rows / height - 0.4, columns / width - 0.6)
    buffer = io.BytesIO()
    Image.fromarray((255 * np.clip(3 - 8 * distance, 0, 1)).astype(np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


@functools.cache
def load_stage(folder: Path, stage: Stage) -> PipelineAdapter:
    """An adapter that holds one stage and nothing else."""
    return load_adapter(folder, frozenset({stage}), image_start=folder.name in STARTING)


def start(folder: Path, inputs: GenerationInputs) -> DenoisingState:
    """The state before the first step, E and D being separate adapters."""
    condition = load_stage(folder, Stage.ENCODE).encode(inputs)
    return load_stage(folder, Stage.DIFFUSE).prepare(condition, inputs)


def final_latents(folder: Path, inputs: GenerationInputs) -> torch.Tensor:
    diffuse = load_stage(folder, Stage.DIFFUSE)
    state = start(folder, inputs)
    return diffuse.latents(diffuse.step(state, state.num_steps))["latents"]


def decode(folder: Path, latents: torch.Tensor, inputs: GenerationInputs) -> NDArray[np.uint8]:
    return load_stage(folder, Stage.DECODE).decode({"latents": latents}, inputs)


def scale_input_images_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Qwen-Image-Edit, which scales every input image to a megapixel, scale it to a 64th of that."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        stock: Any = module.calculate_dimensions
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, stock=stock: stock(area / 64, ratio))


def formats_of(folder: Path, asked: Any = None, device: str = "cpu") -> dict[str, NumberFormat]:
    """The number format of each component of a model folder, as `models[].dtype` asks for it."""
    return find_formats(read_family(folder), NumberFormats.parse(asked), device)


def stock_pipeline(folder: Path, formats: Mapping[str, NumberFormat] | None = None) -> Any:
    """The stock pipeline of a model folder with each component in its number format; without `formats` in float32. All
    tests share it: nothing in it may be changed."""
    return _keep_stock(folder, tuple(sorted((formats or formats_of(folder)).items())))


@functools.cache
def _keep_stock(folder: Path, formats: tuple[tuple[str, NumberFormat], ...]) -> Any:
    return load_stock(folder, dict(formats))


def load_stock(folder: Path, formats: Mapping[str, NumberFormat]) -> Any:
    """The same, loaded for the caller alone."""
    # The stock loader wants components that a folder leaves out to be named.
    index = json.loads((folder / "model_index.json").read_text())
    absent = {name: None for name, value in index.items() if value == [None, None]}
    dtypes = {name: getattr(torch, find_computing_format(number_format)) for name, number_format in formats.items()}
    given = absent | _with_parts_in_float32(folder, index, dtypes)
    if "processor" in index.keys() - absent:  # from_pretrained wants its part for videos, and torchvision for it
        given["processor"] = load_image_text_processor(folder / "processor")
    pipe = getattr(diffusers, detect_family(folder).pipeline_class).from_pretrained(folder, dtype=dtypes, **given)
    for name, part in pipe.components.items():
        # Without accelerate, from_pretrained leaves some float32 files as they are whatever dtype it is given.
        if isinstance(part, diffusers.ModelMixin) and name not in given:
            part.to(dtypes[name])
        if part is not None and formats.get(name) == "int8":
            _quantize(part)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _quantize(model: Any) -> None:
    """As the libraries do it with a `TorchAoConfig`. diffusers: all linear layers but those that the model keeps in
    float32. A pool of Hunyuan-DiT is left out by hand (`modules_to_not_convert`), as the stock code fails with it.
    transformers: all but the head, and a projection behind the rest."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    is_diffusers = isinstance(model, diffusers.ModelMixin)
    of_diffusers = ("time_extra_emb.pooler", *(model._keep_in_fp32_modules or ()))
    kept = [f"{name}." for name in (of_diffusers if is_diffusers else ("lm_head", "text_projection"))]

    def is_quantized(module: torch.nn.Module, path: str) -> bool:
        return isinstance(module, torch.nn.Linear) and not any(name in f"{path}." for name in kept)

    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False), is_quantized)


def _with_parts_in_float32(folder: Path, index: dict[str, Any], dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """Models of which parts stay in float32 whatever is asked for: without accelerate, from_pretrained refuses them."""
    models = {}
    for name, value in index.items():
        model_class = getattr(diffusers, str(value[1]), None) if isinstance(value, list) else None
        if kept := getattr(model_class, "_keep_in_fp32_modules", None):
            model = model_class.from_config(model_class.load_config(folder / name)).eval()  # type: ignore[union-attr]
            stored = load_file(folder / name / "diffusion_pytorch_model.safetensors")
            lowered = {key: stored[key].to(dtypes[name]) for key in stored if not set(kept) & set(key.split("."))}
            model.load_state_dict(stored | lowered, assign=True)
            models[name] = model
    return models


def stock_result(
    folder: Path, inputs: GenerationInputs, output_type: str, formats: Mapping[str, NumberFormat] | None = None
) -> Any:
    """The result of the stock pipeline for a request, with a user's call."""
    return call_stock(stock_pipeline(folder, formats), folder, inputs, output_type)


def choose_stock(pipe: Any, inputs: GenerationInputs) -> Any:
    """The stock pipeline for a request, where it is another one for requests with an input image."""
    kind: Any = diffusers.LTX2ImageToVideoPipeline
    if inputs.start is not None:
        (family,) = (name for name, known in FAMILIES.items() if known.pipeline_class == type(pipe).__name__)
        kind = STARTING_PIPELINES[family][inputs.start.has_mask]
    elif inputs.image is None or not isinstance(pipe, diffusers.LTX2Pipeline):
        return pipe
    other = kind(**pipe.components)
    other.set_progress_bar_config(disable=True)
    return other


def call_stock(pipe: Any, folder: Path, inputs: GenerationInputs, output_type: str, **arguments: Any) -> Any:
    """The result of this stock pipeline of a model folder for a request; `arguments` are added to the call."""
    pipe = choose_stock(pipe, inputs)
    if output_type == "latent" and detect_family(folder).name in ("flux2_klein", "ltx2"):
        return _last_latents(pipe, folder, inputs)
    result = _call_stock(pipe, folder, inputs, output_type=output_type, **arguments)
    return result.frames if detect_family(folder).name in VIDEOS else result.images


def _last_latents(pipe: Any, folder: Path, inputs: GenerationInputs) -> torch.Tensor:
    """The last latents of a pipeline whose output type `latent` is another tensor; those of sound behind those of the
    video."""
    names = ["latents", "audio_latents"] if hasattr(pipe, "audio_vae") else ["latents"]
    pipe._callback_tensor_inputs = names
    seen: list[torch.Tensor] = []

    def keep(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append(torch.cat([tensors[name] for name in names], dim=1))
        return tensors

    watched = {"callback_on_step_end": keep, "callback_on_step_end_tensor_inputs": names}
    _call_stock(pipe, folder, inputs, output_type="latent", **watched)
    return seen[-1]


def _call_stock(pipe: Any, folder: Path, inputs: GenerationInputs, **arguments: Any) -> Any:
    family = detect_family(folder).name
    request = {
        "prompt": inputs.prompt,
        "num_inference_steps": inputs.num_inference_steps,
        "generator": torch.Generator("cpu").manual_seed(inputs.seed),
        **_size(family, pipe, inputs.shape),
    }
    settings = _outputs(family, inputs) | _input_image(family, inputs) | _guidance(family, pipe, inputs)
    own_scheduler = pipe.scheduler
    if inputs.flow_shift is not None:
        name = "shift" if isinstance(own_scheduler, diffusers.FlowMatchEulerDiscreteScheduler) else "flow_shift"
        pipe.scheduler = type(own_scheduler).from_config(own_scheduler.config, **{name: inputs.flow_shift})
    try:
        return pipe(**(request | settings | arguments))
    finally:
        pipe.scheduler = own_scheduler


def _size(family: str, pipe: Any, shape: Shape) -> dict[str, Any]:
    if family != "hunyuan_video_15_i2v":
        return {"height": shape.height, "width": shape.width}
    # The stock pipeline chooses the size whose proportions are nearest to the image's.
    pipe.video_processor.calculate_default_height_width = lambda **_: (shape.height, shape.width)
    return {}


def _outputs(family: str, inputs: GenerationInputs) -> dict[str, Any]:
    """Each family's arguments for several outputs, and for frames."""
    if family not in VIDEOS:
        return {"num_images_per_prompt": inputs.num_outputs}
    frames: dict[str, Any] = {"num_frames": inputs.shape.num_frames}
    if family not in ("cogvideox", "cogvideox_i2v", "wan_i2v", "hunyuan_video_15", "hunyuan_video_15_i2v"):
        return frames | {"num_videos_per_prompt": inputs.num_outputs}
    # These pipelines ignore the number of outputs of a prompt, or fail with it.
    return frames | {"prompt": [inputs.prompt] * inputs.num_outputs}


def _input_image(family: str, inputs: GenerationInputs) -> dict[str, Any]:
    """Each family's arguments for the input image."""
    if inputs.image is None:
        return {}
    if inputs.start is not None:
        # Some of the stock pipelines take the size of the image for that of the output.
        resized = open_input_image(inputs).resize((inputs.shape.width, inputs.shape.height), Image.Resampling.LANCZOS)
        mask = {"mask_image": open_mask(inputs)} if inputs.start.has_mask else {}
        return {"image": resized, "strength": inputs.start.strength, **mask}
    if inputs.more_images or family in ("flux2", "flux2_klein"):
        return {"image": open_input_images(inputs)}
    match family:
        case "flux_kontext":
            # The image has the output's size, and the stock pipeline resizes neither of them.
            size = (inputs.shape.width, inputs.shape.height)
            resized = open_input_image(inputs).resize(size, Image.Resampling.LANCZOS)
            return {"image": resized, "_auto_resize": False, "max_area": inputs.shape.pixels}
        case "flux_fill":
            return {"image": open_input_image(inputs), "mask_image": open_mask(inputs)}
        case "cogvideox_i2v":
            return {"image": [open_input_image(inputs)] * inputs.num_outputs}
        case _:
            return {"image": open_input_image(inputs)}


def _guidance(family: str, pipe: Any, inputs: GenerationInputs) -> dict[str, Any]:
    """Each family's arguments for guidance, and those that keep the requested size."""
    scale = {"guidance_scale": inputs.guidance_scale}
    if inputs.guidance_scale_2 is not None:
        scale["guidance_scale_2"] = inputs.guidance_scale_2
    negative = {"negative_prompt": inputs.negative_prompt}
    match family:
        case "flux" | "flux_kontext" | "flux_fill" | "flux2" | "hunyuan_video":
            return scale
        case "cogvideox" | "cogvideox_i2v":
            return scale | {"negative_prompt": [inputs.negative_prompt] * inputs.num_outputs}
        case "hunyuan_video_15" | "hunyuan_video_15_i2v":
            pipe.guider = pipe.guider.new(guidance_scale=inputs.guidance_scale)
            pipe.vae.enable_slicing()  # its attention takes one video at a time
            return {"negative_prompt": [inputs.negative_prompt] * inputs.num_outputs}
        case "flux2_klein":
            return scale | {"negative_prompt_embeds": pipe.encode_prompt(inputs.negative_prompt)[0]}
        case "qwen_image" | "qwen_image_edit" | "qwen_image_edit_plus":
            return negative | {"true_cfg_scale": inputs.guidance_scale}
        case "sdxl":
            return scale | {"negative_prompt": inputs.negative_prompt or None}
        case "pixart_sigma":
            return scale | negative | {"use_resolution_binning": False, "clean_caption": False}
        case "hunyuan_dit":
            return scale | negative | {"use_resolution_binning": False}
        case "ltx2":
            return scale | negative | _guidance_beside_text(pipe, inputs)
        case _:
            return scale | negative


def _guidance_beside_text(pipe: Any, inputs: GenerationInputs) -> dict[str, Any]:
    """LTX-2 is called with its defaults where there is guidance, but for a pass that its transformer does not tell from
    the plain one; and else with nothing."""
    if inputs.guidance_scale > 1:
        return {} if pipe.transformer.config.perturbed_attn else {"stg_scale": 0.0, "audio_stg_scale": 0.0}
    scales = {"guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
    return scales | {f"audio_{name}": scale for name, scale in scales.items()}
