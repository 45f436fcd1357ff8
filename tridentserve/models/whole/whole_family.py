"""Describes a pipeline of diffusers that no family describes, as a family of one stage: D runs all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tridentserve.errors import ModelFolderError
from tridentserve.models.family import Family
from tridentserve.models.whole.pipeline_source import PipelineCall, read_pipeline_call
from tridentserve.requests import Shape
from tridentserve.stages import Stage

# The name of the adapter's module.
WHOLE = "whole"
# Abilities of families that a model which is served whole has not.
LACKS = (
    "sequence parallelism",
    "stages on workers of their own",
    "pauses and moves to other workers",
    "checkpoints",
    "batches",
    "step caches",
    "LoRAs",
    "previews",
)
# The parameters without which a call cannot make what a request asks for.
_NEEDED = ("prompt", "height", "width", "num_inference_steps", "generator", "output_type")
# A call reports its steps through one of these.
CALLBACKS = ("callback_on_step_end", "callback")
# The name of the parameter for the number of frames.
FRAMES = ("num_frames", "frames", "video_length")
# The name of the parameter for the number of outputs.
OUTPUTS = ("num_images_per_prompt", "num_videos_per_prompt")
# Parameters of calls that start from more than a text, though they have defaults.
_MORE_THAN_TEXT = (
    "strength",
    "mask_image",
    "control_image",
    "control_video",
    "controlnet_conditioning_scale",
    "adapter_conditioning_scale",
    "conditioning_frames",
)
_DEFAULT_STEPS, _DEFAULT_GUIDANCE_SCALE = 50, 1.0
_DEFAULT_SIDE, _DEFAULT_FRAMES, _DEFAULT_FPS = 512, 16, 16
# The steps between numbers of frames that VAEs allow.
_FRAME_MULTIPLES = (8, 4)
# Most VAEs divide sides by eight. A transformer divides those of the latents by two more.
_VAE_FACTOR, _PATCH = 8, 2


def describe_whole_family(class_name: str, index: Mapping[str, Any], place: Path) -> Family:
    """The family of a model folder by its `model_index.json`, which is at `place`. Raises `ModelFolderError` for a
    class that is unknown, or whose call needs more or takes less than requests have."""
    call = read_pipeline_call(class_name)
    if call is None:
        raise ModelFolderError(
            f"{place} names the pipeline class {class_name!r}, which the installed diffusers does not have; install a "
            "version that has it, or use another model"
        )
    _check_call(call, class_name, place)
    frames = find_parameter(call, FRAMES)
    components = tuple(sorted(name for name, value in index.items() if _is_component(value)))
    default_frames = _read_number(call, frames, _DEFAULT_FRAMES) if frames is not None else 1
    height, width = _read_number(call, "height", _DEFAULT_SIDE), _read_number(call, "width", _DEFAULT_SIDE)
    has_shape = frames is not None or isinstance(call.defaults.get("height"), int)
    return Family(
        name=WHOLE,
        pipeline_class=class_name,
        whole=True,
        size_multiple=_choose_size_multiple(call, components),
        default_steps=_read_number(call, "num_inference_steps", _DEFAULT_STEPS),
        default_guidance_scale=_read_guidance_scale(call),
        components={Stage.ENCODE: (), Stage.DIFFUSE: components, Stage.DECODE: ()},
        options=tuple(sorted(name for name, value in index.items() if _is_option(name, value))),
        shares_tokens=False,
        caches_steps=False,
        loras=False,
        negative_prompt="negative_prompt" in call.parameters,
        absent_fields=_list_absent_fields(call),
        frame_multiple=None if frames is None else _choose_frame_multiple(default_frames),
        default_shape=Shape(height, width, default_frames) if has_shape else None,
        default_fps=None if frames is None else _read_number(call, "frame_rate", _DEFAULT_FPS),
    )


def find_parameter(call: PipelineCall, names: tuple[str, ...]) -> str | None:
    """The first of these parameters that a call has."""
    return next((name for name in names if name in call.parameters), None)


def _check_call(call: PipelineCall, class_name: str, place: Path) -> None:
    fault = None
    if absent := [name for name in _NEEDED if name not in call.parameters]:
        fault = f"takes no {absent[0]}"
    elif needed := [name for name in call.required if name != "prompt"]:
        fault = f"needs {needed[0]}, which requests to such models do not have"
    elif more := [name for name in _MORE_THAN_TEXT if name in call.parameters]:
        fault = f"starts from more than a text ({more[0]})"
    elif find_parameter(call, CALLBACKS) is None:
        fault = f"reports no steps (it has no {CALLBACKS[0]})"
    if fault is not None:
        raise ModelFolderError(
            f"{place} names the pipeline class {class_name!r}, which is no family here, and cannot be served whole, as "
            f"its call {fault}; use a pipeline from text to images or videos, or one of docs/models.md"
        )


def _is_component(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) and part for part in value)


def _is_option(name: str, value: object) -> bool:
    return not (name.startswith("_") or _is_component(value) or value == [None, None])


def _read_number(call: PipelineCall, name: str | None, usual: int) -> int:
    value = call.defaults.get(name) if name is not None else None
    return int(value) if isinstance(value, int | float) and value >= 1 else usual


def _read_guidance_scale(call: PipelineCall) -> float:
    value = call.defaults.get("guidance_scale")
    return float(value) if isinstance(value, int | float) else _DEFAULT_GUIDANCE_SCALE


def _choose_size_multiple(call: PipelineCall, components: tuple[str, ...]) -> int:
    has_transformer = any(name.endswith("transformer") for name in components)
    return max(call.size_multiple, _VAE_FACTOR * _PATCH if has_transformer else _VAE_FACTOR)


def _choose_frame_multiple(default_frames: int) -> int:
    """The multiple that the default number of frames suggests: 161 frames are one more than a multiple of 8, while 16
    frames tell of no rule."""
    return next((multiple for multiple in _FRAME_MULTIPLES if default_frames % multiple == 1), 1)


def _list_absent_fields(call: PipelineCall) -> frozenset[str]:
    """The fields of a request that a call has no parameter for, or one that is best left alone (None)."""
    present = {
        "negative_prompt": "negative_prompt" in call.parameters,
        "guidance_scale": "guidance_scale" in call.defaults,
        "n": find_parameter(call, OUTPUTS) is not None,
    }
    return frozenset(name for name, is_there in present.items() if not is_there)


def with_trained_size(family: Family, config: Mapping[str, Any]) -> Family:
    """The family with the size that the denoising model was trained for as the default, where its config says it and
    the pipeline has no other default."""
    side = config.get("sample_size")
    if not isinstance(side, int) or side < 1 or (family.default_shape is not None and family.frame_multiple is None):
        return family
    num_frames = family.default_shape.num_frames if family.default_shape is not None else 1
    return replace(family, default_shape=Shape(side * _VAE_FACTOR, side * _VAE_FACTOR, num_frames))
