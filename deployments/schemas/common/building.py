"""Checks a read body against the limits of its model, and makes the request of it that scheduler and workers get."""

from __future__ import annotations

import re
import secrets

from deployments.models.served import ServedModel
from deployments.schemas.common.generation_request import GenerationRequest
from deployments.schemas.common.lora import find_uses
from tridentserve.errors import InvalidRequestError
from tridentserve.requests import GenerationInputs, RequestSpec, Shape

_TIERS = {"priority": 1, "flex": -1}
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
_RANDOM_SEEDS = 2**53  # every one of them survives a JSON parser that holds numbers as doubles


def build_request(
    request: GenerationRequest, model: ServedModel, shape: Shape, new_id: str
) -> tuple[RequestSpec, GenerationInputs]:
    """A checked request as the scheduler and workers get it. `new_id` is its id unless it has its own."""
    steps = request.num_inference_steps or model.default_steps
    guidance_scale, own, interval_ms = request.guidance_scale, model.own_fields, request.preview_interval_ms
    if "true_cfg_scale" in own and request.true_cfg_scale is not None:
        guidance_scale = request.true_cfg_scale
    quality, loras = model.choose_quality(request.quality), find_uses(request.lora, request.loras, model)
    spec = RequestSpec(
        request_id=request.request_id or new_id,
        model=model.name,
        shape=shape,
        num_inference_steps=steps,
        num_outputs=request.num_outputs,
        slo_s=None if request.slo_ms is None else request.slo_ms / 1000,
        loras=tuple(use.file.key for use in loras),
        priority=request.priority + _TIERS.get(request.service_tier, 0),
        on_late=request.on_late,
        quality=quality,
        cheaper_quality="fast" if model.caches_steps else None,
        whole=model.family.whole,
    )
    inputs = GenerationInputs(
        prompt=request.prompt,
        shape=shape,
        num_inference_steps=steps,
        guidance_scale=model.default_guidance_scale if guidance_scale is None else guidance_scale,
        seed=secrets.randbelow(_RANDOM_SEEDS) if request.seed is None else request.seed,
        negative_prompt=request.negative_prompt,
        num_outputs=request.num_outputs,
        loras=loras,
        guidance_scale_2=request.guidance_scale_2 if "guidance_scale_2" in own else None,
        flow_shift=request.flow_shift if "flow_shift" in own else None,
        quality=quality,
        partial_images=0 if model.family.whole else request.partial_images,
        preview_interval_s=None if model.family.whole or interval_ms is None else interval_ms / 1000,
        seed_drawn=request.seed is None,
        id_drawn=request.request_id is None,
    )
    return spec, inputs


def check_limits(request: GenerationRequest, model: ServedModel) -> None:
    """Check the outputs, steps, texts and LoRAs of a request. Raises `InvalidRequestError`."""
    limits = model.limits
    _check_at_most("n", request.num_outputs, limits.max_outputs)
    _check_at_most("num_inference_steps", request.num_inference_steps or 1, limits.max_steps)
    for name, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt)):
        if len(text) > limits.max_prompt_chars:
            raise InvalidRequestError(f"{name}: has more than {limits.max_prompt_chars} characters", name)
    asked = {
        "negative_prompt": bool(request.negative_prompt),
        "guidance_scale": request.guidance_scale is not None,
        "n": request.num_outputs > 1,
    }
    for name in sorted(model.family.absent_fields):
        if asked[name]:
            raise InvalidRequestError(f"{name}: the pipeline of this model does not take it", name)
    find_uses(request.lora, request.loras, model)


def _check_at_most(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidRequestError(f"{name}: must be at most {limit} for this model", name)


def resolve_size(request: GenerationRequest, default: Shape) -> tuple[int, int, str]:
    """The requested width and height, and the field that determines them. `size` and the other two may both be given
    when they agree. Raises `InvalidRequestError`."""
    if (request.width is None) != (request.height is None):
        missing = "width" if request.width is None else "height"
        raise InvalidRequestError(f"{missing}: give both width and height, or size", missing)
    asked = None if request.width is None or request.height is None else (request.width, request.height)
    if request.size is None or request.size == "auto":
        width, height = asked or (default.width, default.height)
        param = "size" if asked is None else "width"
        return width, height, param
    match = _SIZE.fullmatch(request.size)
    if match is None:
        raise InvalidRequestError("size: must be `WxH` in pixels, such as 512x512, or `auto`", "size")
    size = (int(match[1]), int(match[2]))
    if asked is not None and asked != size:
        raise InvalidRequestError("size: differs from width and height; give one of the two forms", "size")
    return *size, "size"
