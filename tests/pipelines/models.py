"""Model folders for the tests, and the stock pipelines to compare with."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray

from tridentserve.checkpoints import detect_family
from tridentserve.pipelines import DenoisingState, PipelineAdapter, ensure_tiny, load_adapter
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

torch.set_num_threads(1)

# Tiny models, and variants of them that real checkpoints of the families have.
VARIANTS = ("sd3", "sd3-medium", "sd3-without-t5", "sd3-shifting", "flux", "flux-schnell")


def model_folder(variant: str, cache_dir: Path) -> Path:
    """The folder of a variant, made on first use."""
    tiny = ensure_tiny(variant.split("-")[0], cache_dir)
    folder = cache_dir / variant
    if variant in ("sd3", "flux") or folder.is_dir():
        return tiny if variant in ("sd3", "flux") else folder
    shutil.copytree(tiny, folder)
    if variant == "sd3-without-t5":
        edit_json(folder / "model_index.json", text_encoder_3=[None, None], tokenizer_3=[None, None])
        shutil.rmtree(folder / "text_encoder_3")
    elif variant == "sd3-shifting":
        edit_json(folder / "scheduler" / "scheduler_config.json", use_dynamic_shifting=True)
    elif variant == "sd3-medium":
        replace_transformer(folder, diffusers.SD3Transformer2DModel, dual_attention_layers=(), qk_norm=None)
    else:
        replace_transformer(folder, diffusers.FluxTransformer2DModel, guidance_embeds=False)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_transformer(folder: Path, model_class: Any, **changes: Any) -> None:
    """Another transformer with random weights, of the folder's config with changes."""
    config = model_class.load_config(folder / "transformer") | changes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class.from_config(config).save_pretrained(folder / "transformer")


def make_inputs(height: int = 64, width: int = 96, steps: int = 3, **changes: Any) -> GenerationInputs:
    arguments: dict[str, Any] = {
        "prompt": "a lighthouse in a storm",
        "negative_prompt": "fog",
        "guidance_scale": 4.0,
        "seed": 7,
        "shape": Shape(height, width),
        "num_inference_steps": steps,
    }
    return GenerationInputs(**(arguments | changes))


@functools.cache
def load_stage(folder: Path, stage: Stage) -> PipelineAdapter:
    """An adapter that holds one stage and nothing else."""
    return load_adapter(folder, frozenset({stage}))


def start(folder: Path, inputs: GenerationInputs) -> DenoisingState:
    """The state before the first step, E and D being separate adapters."""
    condition = load_stage(folder, Stage.ENCODE).encode(inputs)
    return load_stage(folder, Stage.DIFFUSE).prepare(condition, inputs)


def final_latents(folder: Path, inputs: GenerationInputs) -> torch.Tensor:
    diffuse = load_stage(folder, Stage.DIFFUSE)
    return diffuse.latents(diffuse.step(start(folder, inputs), inputs.num_inference_steps))["latents"]


def decode(folder: Path, latents: torch.Tensor, inputs: GenerationInputs) -> NDArray[np.uint8]:
    return load_stage(folder, Stage.DECODE).decode({"latents": latents}, inputs)


@functools.cache
def stock_pipeline(folder: Path, dtype: torch.dtype) -> Any:
    # The stock loader wants components that a folder leaves out to be named.
    index = json.loads((folder / "model_index.json").read_text())
    absent = {name: None for name, value in index.items() if value == [None, None]}
    pipe = getattr(diffusers, detect_family(folder).pipeline_class).from_pretrained(folder, dtype=dtype, **absent)
    # Without accelerate, from_pretrained leaves some float32 files as they are whatever dtype it is given.
    pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def stock_result(folder: Path, inputs: GenerationInputs, output_type: str, dtype: torch.dtype = torch.float32) -> Any:
    """What the stock pipeline gives for a request, called as a user would."""
    guided = {"negative_prompt": inputs.negative_prompt} if detect_family(folder).name == "sd3" else {}
    return stock_pipeline(folder, dtype)(
        prompt=inputs.prompt,
        height=inputs.shape.height,
        width=inputs.shape.width,
        num_inference_steps=inputs.num_inference_steps,
        guidance_scale=inputs.guidance_scale,
        num_images_per_prompt=inputs.num_outputs,
        generator=torch.Generator("cpu").manual_seed(inputs.seed),
        output_type=output_type,
        **guided,
    ).images
