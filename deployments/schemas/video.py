"""The body of a video request: its frames, their rate, and how both follow from a length in seconds."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from deployments.models.served import ServedModel
from deployments.schemas.image import (
    GenerationRequest,
    Text,
    asked_size,
    check_limits,
    check_size,
    made,
    model_of,
    parse_as,
)
from deployments.schemas.image_field import SourceField, source_png
from tridentserve.errors import InvalidRequestError
from tridentserve.models.input_image import check_given
from tridentserve.requests import GenerationInputs, RequestSpec, Shape

MAX_FPS = 120.0
MAX_SECONDS = 3600.0
MAX_PRIORITY = 1000
_SOURCE = "input_reference"


def _number(value: Any) -> Any:
    """OpenAI's clients send the seconds as a text."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        raise PydanticCustomError("number", "must be a number, such as 4") from None


class VideoRequest(GenerationRequest):
    """The body of `POST /v1/videos` and `POST /v1/videos/sync`, and the dict of the Python handle for a video.

    `num_frames` wins over `seconds`. `num_outputs_per_prompt` is another name of `n`.
    """

    num_frames: int | None = Field(default=None, ge=1)
    fps: float | None = Field(default=None, gt=0, le=MAX_FPS, description="frames per second of the MP4 file")
    seconds: Annotated[float, BeforeValidator(_number), Field(gt=0, le=MAX_SECONDS)] | None = None
    num_outputs_per_prompt: int | None = Field(default=None, ge=1)
    priority: int = Field(
        default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="of two jobs that wait, the higher one goes first"
    )
    output_format: Literal["mp4"] = "mp4"
    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("image", "images", "image_url"), "a picture to start from is called input_reference here"
    )
    input_reference: SourceField | None = Field(default=None, repr=False)


class HandleVideoRequest(VideoRequest):
    """A video request of the Python handle, which can also give the frames as an array."""

    output_format: Literal["mp4", "frames"] = "mp4"  # type: ignore[assignment]
    stream: bool = False
    response_format: Text | None = None


def parse_video(body: Any, strict: bool = True) -> VideoRequest:
    """The body with `extra_body` merged in. Raises as `parse_as` does."""
    return parse_as(VideoRequest, body, strict)


def to_video_request(request: VideoRequest, models: Mapping[str, ServedModel]) -> tuple[RequestSpec, GenerationInputs]:
    """What the scheduler and the workers get of it. The default is the first model of `models` that makes videos, from
    a picture when there is one. Decodes the picture, which may take a second.

    Raises `InvalidRequestError`, or its subclass `UnknownModelError`.
    """
    model = model_of(request.model, models, videos=True, from_picture=request.input_reference is not None)
    has_picture = request.input_reference is not None
    others = [name for name, other in models.items() if other.makes_videos and other.takes_image == has_picture]
    check_given(model.family, has_picture, _SOURCE, others)
    request = _with_outputs(request)
    check_limits(request, model)
    fps = request.fps or float(model.default_fps)
    picture, shape = None, model.default_shape
    if request.input_reference is None:
        shape = _shape(request, model, fps, shape)
    else:
        picture, shape = source_png(
            request.input_reference,
            model,
            _SOURCE,
            lambda width, height: _shape(request, model, fps, model.default_shape_like(width, height)),
        )
    spec, inputs = made(request, model, shape, f"video_{uuid.uuid4().hex}")
    return spec, replace(inputs, fps=fps, output_format=request.output_format, image=picture)


def _shape(request: VideoRequest, model: ServedModel, fps: float, default: Shape) -> Shape:
    width, height, param = asked_size(request, default)
    check_size(width, height, param, model)
    return Shape(height=height, width=width, num_frames=_num_frames(request, model, fps, width * height))


def _with_outputs(request: VideoRequest) -> VideoRequest:
    asked = request.num_outputs_per_prompt
    if asked is None:
        return request
    if "n" in request.model_fields_set and request.n != asked:
        raise InvalidRequestError("num_outputs_per_prompt: differs from n; give one of the two", "n")
    return request.model_copy(update={"n": asked})


def _num_frames(request: VideoRequest, model: ServedModel, fps: float, pixels: int) -> int:
    """As many as asked for, else the allowed number nearest to the length asked for. Raises `InvalidRequestError`."""
    limits, multiple = model.limits, model.family.frame_multiple
    if request.num_frames is not None:
        param, number = "num_frames", request.num_frames
        if not model.family.allows_frames(number):
            near = model.frames_near(number)
            raise InvalidRequestError(
                f"num_frames: must be 1 plus a multiple of {multiple} for this model, such as {near}", "num_frames"
            )
    elif request.seconds is not None:
        param, number = "seconds", model.frames_near(request.seconds * fps)
    else:
        most = max(1, min(model.default_shape.num_frames, limits.max_pixel_frames // pixels))
        param, number = "size", max(allowed for allowed in model.frame_numbers if allowed <= most)
    if number > limits.max_frames:
        raise InvalidRequestError(f"{param}: makes {number} frames; at most {limits.max_frames} for this model", param)
    if number * pixels > limits.max_pixel_frames:
        raise InvalidRequestError(
            f"{param}: pixels times frames must be at most {limits.max_pixel_frames} for this model", param
        )
    return number
