"""Fields of a body that are taken, and have no effect on this request: its answer names them."""

from __future__ import annotations

from deployments.models.served import ServedModel
from deployments.schemas.common.foreign_fields import log_ignored
from deployments.schemas.common.generation_request import GenerationRequest
from deployments.schemas.common.lora import LoraChoice
from deployments.schemas.image import DALL_E_QUALITIES, ImageRequest

_OF_PREVIEWS = ("partial_images", "preview_interval_ms")
_OF_SOME_MODELS = ("true_cfg_scale", "guidance_scale_2", "flow_shift", "strength")
_OF_OPENAI = ("background", "input_fidelity", "user")
_OF_VIDEOS = ("num_frames", "fps")
# Values of `quality` that are what every model does.
_PLAIN_QUALITIES = frozenset({"auto", "exact", "lossless"})


def list_ignored(request: GenerationRequest, model: ServedModel, streams: bool) -> tuple[str, ...]:
    """List the fields that only other servers know, those that have no meaning here or for `model`, and those about
    previews unless the answer `streams` and the model has them."""
    defaults = type(request).model_fields
    sent = {name for name in request.model_fields_set if getattr(request, name) != defaults[name].default}
    sent |= {"background"} & request.model_fields_set
    without_effect = {*_OF_OPENAI, *(name for name in _OF_SOME_MODELS if name not in model.own_fields)}
    if not streams or model.family.whole:
        without_effect.update(_OF_PREVIEWS)
    if not _has_effect_by_quality(request, model):
        without_effect.add("quality")
    if not model.family.negative_prompt:
        without_effect.add("negative_prompt")
    if isinstance(request, ImageRequest):
        without_effect.update(_OF_VIDEOS)
        if request.output_format == "png":
            without_effect.add("output_compression")
    found = sent & without_effect
    for choice in (request.lora, *(request.loras or ())):
        if isinstance(choice, LoraChoice):
            found.update(choice.list_ignored())
    for name in found:
        log_ignored(name)
    return tuple(sorted(found | {*request.ignored}))


def _has_effect_by_quality(request: GenerationRequest, model: ServedModel) -> bool:
    if request.quality in _PLAIN_QUALITIES or (isinstance(request, ImageRequest) and request.chooses_urls):
        return True
    return model.caches_steps and (
        request.quality not in DALL_E_QUALITIES or model.choose_quality(request.quality) != model.choose_quality("auto")
    )
