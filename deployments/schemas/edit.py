"""The body of an edit: a request for images that starts from images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from deployments.models.served import ServedModel
from deployments.schemas.common.building import build_request, check_limits, resolve_size
from deployments.schemas.common.generation_request import NO_OTHER_INPUTS
from deployments.schemas.common.model_choice import check_size, choose_model
from deployments.schemas.image import ImageRequest, add_file_format, build_image_request, make_image_id
from deployments.schemas.image_field import ImageField, ImagesField, build_beside_loop, encode_input_images, encode_mask
from tridentserve.errors import InvalidRequestError
from tridentserve.models.input_image import check_image_count, check_mask_presence
from tridentserve.requests import GenerationInputs, RequestSpec, Shape


class EditRequest(ImageRequest):
    """The body of `POST /v1/images/edits`, and the dict of the Python handle for a model that edits images."""

    other_names: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("images", "image_reference"), "image"),
        "mask_image": "mask",
    }
    elsewhere: ClassVar[Mapping[str, str]] = {
        **NO_OTHER_INPUTS,
        **dict.fromkeys(("input_reference", "reference_image", "url"), "the input image is called image here"),
    }

    image: ImagesField = Field(repr=False)
    mask: ImageField | None = Field(default=None, repr=False)
    strength: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="The part of the steps that is computed, by a model that makes images from text too: the more, the "
        "further the image is changed. The default is that of the model's stock pipeline.",
    )
    input_fidelity: Literal["high", "low"] | None = Field(
        default=None, description="The field is accepted because OpenAI's clients send it. It has no effect."
    )


def build_edit_request(request: EditRequest, models: Mapping[str, ServedModel]) -> tuple[RequestSpec, GenerationInputs]:
    """The request as the scheduler and the workers get it. The default model is the first of `models` that edits
    images. Decodes the images, which may take a second.

    Raises `InvalidRequestError`, or its subclass `UnknownModelError`.
    """
    has_mask = request.mask is not None
    editors = {name: model for name, model in models.items() if model.edits(1) and model.allows_mask(has_mask)}
    # A request that names no model gets one that takes its mask, or none, where there is one.
    model = choose_model(request.model, models if request.model is not None else editors or models, False, True)
    check_mask_presence(model.family, has_mask, editors)
    check_limits(request, model)
    others = [name for name, other in editors.items() if other.edits(len(request.image))]
    check_image_count(model.family, len(request.image), model.max_images, "image", others)

    def choose_shape(width: int, height: int) -> Shape:
        width, height, param = resolve_size(request, model.choose_size_near(width, height))
        check_size(width, height, param, model)
        return Shape(height=height, width=width)

    encoded = encode_input_images(request.image, model, "image", choose_shape)
    spec, inputs = start_from_image(
        *build_request(request, model, encoded.shape, make_image_id()), request.strength, model, has_mask
    )
    first, *more = encoded.files
    mask = None if request.mask is None else encode_mask(request.mask, encoded, "mask")
    inputs = replace(inputs, image=first, more_images=tuple(more), mask=mask, token_ratio=encoded.token_ratio)
    return replace(spec, token_ratio=encoded.token_ratio), add_file_format(inputs, request)


def start_from_image(
    spec: RequestSpec, inputs: GenerationInputs, strength: float | None, model: ServedModel, has_mask: bool = False
) -> tuple[RequestSpec, GenerationInputs]:
    """The request with the step at which it starts from its image, at this strength or at the model's default, and with
    the number of steps from there; as it is for a model that computes all steps. Raises `InvalidRequestError` where no
    step is left."""
    rules = model.family.image_start if model.family.starts_from_image else None
    if rules is None:
        return spec, inputs
    start, steps = rules.make_start(strength, has_mask), inputs.num_inference_steps
    if (left := start.count_steps(steps)) < 1:
        raise InvalidRequestError(
            f"strength: {start.strength:g} of {steps} steps is less than one; raise it, or num_inference_steps",
            "strength",
        )
    return replace(spec, num_inference_steps=left), replace(inputs, start=start)


async def build_images(
    request: ImageRequest, models: Mapping[str, ServedModel], arrived_s: float
) -> tuple[RequestSpec, GenerationInputs]:
    """An edit or another request for images, as the scheduler and the workers get it. The images of an edit are decoded
    beside the event loop, and the request counts the seconds since `arrived_s` (of the monotonic clock). Raises as
    `build_edit_request` and `build_image_request` do, and `OverloadedError`."""
    if not isinstance(request, EditRequest):
        return build_image_request(request, models)
    known = dict(models)  # they may change beside the thread
    return await build_beside_loop(lambda: build_edit_request(request, known), True, arrived_s)
