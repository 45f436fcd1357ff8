"""The body of an image request: its own fields, and the request that is made of it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from deployments.models.served import ServedModel
from deployments.schemas.common.building import build_request, check_limits, resolve_size
from deployments.schemas.common.generation_request import NO_OTHER_INPUTS, GenerationRequest
from deployments.schemas.common.model_choice import check_size, choose_model
from deployments.schemas.common.parsing import parse_as
from tridentserve.requests import GenerationInputs, RequestSpec, Shape

_FORMATS = {"png": "png", "jpeg": "jpeg", "jpg": "jpeg", "webp": "webp"}
# Values of `quality` that only DALL-E has.
DALL_E_QUALITIES = frozenset({"standard", "hd"})


def _read_format(value: Any) -> Any:
    """The format, also as the ending of a file's name."""
    return _FORMATS.get(value.lower(), value) if isinstance(value, str) else value


def _refuse_transparency(value: Any) -> Any:
    if value == "transparent":
        raise PydanticCustomError("background", "no model here makes transparent images; send auto or opaque")
    return value


class ImageRequest(GenerationRequest):
    """The body of `POST /v1/images/generations`, and the dict of the Python handle. `build_image_request` checks
    the limits that depend on the model."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        **NO_OTHER_INPUTS,
        **dict.fromkeys(
            ("image", "images", "image_reference", "input_reference", "mask", "strength"),
            "an image to edit goes to POST /v1/images/edits, as image",
        ),
    }

    stream: bool = Field(default=False, description="True for an answer of server-sent events.")
    response_format: Literal["b64_json", "url", "file"] | None = Field(
        default=None,
        description="The form of the images in the answer: base64, or a data URL that holds the image itself. With "
        "`file` the answer is the file of the image, or a ZIP file with several. "
        "The default is base64, but for a `quality` that only DALL-E knows it is DALL-E's, the URL.",
    )
    output_format: Annotated[Literal["png", "jpeg", "webp"], BeforeValidator(_read_format)] = Field(
        default="png", description="The format of the image files."
    )
    output_compression: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="The quality of JPEG and WebP files, from 0 (small) to 100. It has no effect on PNG files.",
    )
    num_frames: int | None = Field(
        default=None, ge=1, le=1, description="The field is accepted because vLLM-Omni's benchmark sends it: 1."
    )
    fps: float | None = Field(
        default=None, description="The field is accepted because vLLM-Omni's benchmark sends it. It has no effect."
    )
    background: Annotated[Literal["auto", "opaque"], BeforeValidator(_refuse_transparency)] = Field(
        default="auto", description="The field is accepted because OpenAI's clients send it. It has no effect."
    )

    @property
    def wants_file(self) -> bool:
        """True where the answer is the file of the image itself."""
        return self.response_format == "file" and not self.stream

    @property
    def wants_urls(self) -> bool:
        """True where the images of the answer are data URLs."""
        return self.response_format == "url" or self.chooses_urls

    @property
    def chooses_urls(self) -> bool:
        """True where `quality` makes the images data URLs. Clients written for DALL-E, such as LangChain's, name one of
        its qualities and count on its default."""
        return self.response_format is None and self.quality in DALL_E_QUALITIES


def parse_image_request(body: Any, lenient: bool = True) -> ImageRequest:
    """The body of an image request with `extra_body` merged in. Raises as `parse_as` does."""
    return parse_as(ImageRequest, body, lenient=lenient)


def build_image_request(
    body: Mapping[str, Any] | ImageRequest, models: Mapping[str, ServedModel]
) -> tuple[RequestSpec, GenerationInputs]:
    """The request as the scheduler and workers get it. The default model is the first of `models` that makes images.

    Raises `InvalidRequestError`, or its subclass `UnknownModelError`.
    """
    request = body if isinstance(body, ImageRequest) else parse_image_request(body)
    model = choose_model(request.model, models, videos=False)
    check_limits(request, model)
    width, height, param = resolve_size(request, Shape(model.default_side, model.default_side))
    check_size(width, height, param, model)
    spec, inputs = build_request(request, model, Shape(height=height, width=width), make_image_id())
    return spec, add_file_format(inputs, request)


def add_file_format(inputs: GenerationInputs, request: ImageRequest) -> GenerationInputs:
    """The inputs with the format of the files that are asked for."""
    return replace(inputs, output_format=request.output_format, compression=request.output_compression)


def make_image_id() -> str:
    return f"img-{uuid.uuid4().hex}"
