"""The body of an edit: a request of pictures that starts from a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from deployments.models import ServedModel
from deployments.schemas import ImageRequest, asked_size, check_limits, check_size, made, model_of, new_image_id
from deployments.source_field import SourceField, source_png
from tridentserve.errors import InvalidRequestError
from tridentserve.requests import GenerationInputs, RequestSpec, Shape


class EditRequest(ImageRequest):
    """The body of `POST /v1/images/edits`, and the dict of the Python handle for a model that edits pictures."""

    image: SourceField = Field(repr=False)
    mask: Any = Field(default=None, description="refused: the whole picture is edited")


def to_edit_request(request: EditRequest, models: Mapping[str, ServedModel]) -> tuple[RequestSpec, GenerationInputs]:
    """What the scheduler and the workers get of it. The first model of `models` that edits pictures is the default.
    Decodes the picture, which may take a second.

    Raises `InvalidRequestError`, or its subclass `UnknownModelError`.
    """
    model = model_of(request.model, models, videos=False, from_picture=True)
    if request.mask is not None:
        raise InvalidRequestError("mask: is not supported by this model, which edits the whole picture", "mask")
    check_limits(request, model)
    picture, width, height = source_png(request.image, model, "image")
    width, height, param = asked_size(request, model.size_near(width, height))
    check_size(width, height, param, model)
    spec, inputs = made(request, model, Shape(height=height, width=width), new_image_id())
    return spec, replace(inputs, image=picture)
