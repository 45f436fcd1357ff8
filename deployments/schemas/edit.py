"""The body of an edit: a request of pictures that starts from a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from deployments.models.served import ServedModel
from deployments.schemas.image import ImageRequest, asked_size, check_limits, check_size, made, model_of, new_image_id
from deployments.schemas.image_field import SourceField, source_png
from tridentserve.errors import InvalidRequestError
from tridentserve.requests import GenerationInputs, RequestSpec, Shape


def _none(value: int) -> int:
    if value:
        raise PydanticCustomError("number", "must be 0: a picture is sent when it is finished")
    return value


class EditRequest(ImageRequest):
    """The body of `POST /v1/images/edits`, and the dict of the Python handle for a model that edits pictures.

    `input_fidelity` and `partial_images` are what OpenAI's clients may send, without effect."""

    other_names: ClassVar[Mapping[str, str]] = {"images": "image"}
    elsewhere: ClassVar[Mapping[str, str]] = {"input_reference": "a picture to start from is called image here"}

    image: SourceField = Field(repr=False)
    mask: Any = Field(default=None, description="refused: the whole picture is edited")
    input_fidelity: Literal["high", "low"] | None = None
    partial_images: Annotated[int, AfterValidator(_none)] = 0


def to_edit_request(request: EditRequest, models: Mapping[str, ServedModel]) -> tuple[RequestSpec, GenerationInputs]:
    """What the scheduler and the workers get of it. The first model of `models` that edits pictures is the default.
    Decodes the picture, which may take a second.

    Raises `InvalidRequestError`, or its subclass `UnknownModelError`.
    """
    model = model_of(request.model, models, videos=False, from_picture=True)
    if request.mask is not None:
        raise InvalidRequestError("mask: is not supported by this model, which edits the whole picture", "mask")
    check_limits(request, model)

    def shape_of(width: int, height: int) -> Shape:
        width, height, param = asked_size(request, model.size_near(width, height))
        check_size(width, height, param, model)
        return Shape(height=height, width=width)

    picture, shape = source_png(request.image, model, "image", shape_of)
    spec, inputs = made(request, model, shape, new_image_id())
    return spec, replace(inputs, image=picture)
