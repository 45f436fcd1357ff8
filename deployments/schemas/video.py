"""The body of a video request: its frames, their rate, and how both follow from a length in seconds."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from deployments.config.models import MAX_FPS
from deployments.models.served import ServedModel
from deployments.schemas.common.building import build_request, check_limits, resolve_size
from deployments.schemas.common.generation_request import NO_OTHER_INPUTS, GenerationRequest, PlainText
from deployments.schemas.common.model_choice import check_size, choose_model
from deployments.schemas.common.parsing import parse_as
from deployments.schemas.image_field import ImageField, encode_input_image
from tridentserve.errors import InvalidRequestError
from tridentserve.models.input_image import check_image_count
from tridentserve.requests import GenerationInputs, RequestSpec, Shape

MAX_SECONDS = 3600.0
_IMAGE_FIELD = "input_reference"


def _parse_number(value: Any) -> Any:
    """A number, also where OpenAI's clients send it as a text."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        raise PydanticCustomError("number", "must be a number, such as 4") from None


def _refuse_stream(value: bool) -> bool:
    if value:
        raise PydanticCustomError("stream", "videos are not streamed; GET /v1/videos/{id} tells the progress of a job")
    return value


class VideoRequest(GenerationRequest):
    """The body of `POST /v1/videos` and `POST /v1/videos/sync`, and the dict of the Python handle for a video."""

    num_frames: int | None = Field(
        default=None,
        ge=1,
        description="The number of frames. The default follows from `seconds`, or else is the model's.",
    )
    fps: float | None = Field(
        default=None, gt=0, le=MAX_FPS, description="Frames per second of the MP4 file. The default is the model's."
    )
    seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS), BeforeValidator(_parse_number)] | None = Field(
        default=None, description="The length in seconds. It has no effect if `num_frames` is given."
    )
    output_format: Literal["mp4"] = Field(default="mp4", description="The format of the files.")
    stream: Annotated[bool, AfterValidator(_refuse_stream)] = Field(
        default=False, description="The field is accepted where it is false: videos are not streamed."
    )
    other_names: ClassVar[Mapping[str, str]] = {"image_reference": _IMAGE_FIELD}
    without_effect: ClassVar[frozenset[str]] = frozenset({"background", "response_format"})
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"video_params": ("width", "height", "num_frames", "fps")}
    elsewhere: ClassVar[Mapping[str, str]] = {
        **NO_OTHER_INPUTS,
        **dict.fromkeys(("image", "images", "image_url"), "the input image is called input_reference here"),
    }
    input_reference: ImageField | None = Field(default=None, repr=False)


class HandleVideoRequest(VideoRequest):
    """A video request of the Python handle, which can also return the frames as arrays."""

    output_format: Literal["mp4", "frames"] = Field(  # type: ignore[assignment]
        default="mp4", description="`mp4` for files, `frames` for arrays of frames."
    )
    stream: bool = Field(default=False, description="The field has no effect here.")
    response_format: PlainText | None = Field(default=None, description="The field has no effect here.")


def parse_video_request(body: Any, strict: bool = True, lenient: bool = True) -> VideoRequest:
    """The body with `extra_body` merged in. Raises as `parse_as` does."""
    return parse_as(VideoRequest, body, strict, lenient)


def build_video_request(
    request: VideoRequest, models: Mapping[str, ServedModel]
) -> tuple[RequestSpec, GenerationInputs]:
    """The request as the scheduler and the workers get it. The default model is the first of `models` that makes videos
    (from an image when the request has one). Decodes the image, which may take a second.

    Raises `InvalidRequestError`, or its subclass `UnknownModelError`.
    """
    model = choose_model(request.model, models, videos=True, from_image=request.input_reference is not None)
    has_image = request.input_reference is not None
    others = [
        name
        for name, other in models.items()
        if other.makes_videos and (other.takes_image if has_image else not other.needs_image)
    ]
    check_image_count(model.family, int(has_image), model.max_images, _IMAGE_FIELD, others)
    check_limits(request, model)
    fps = request.fps or float(model.default_fps)
    image, shape = None, model.default_shape
    if request.input_reference is None:
        shape = choose_shape(request, model, fps, shape)
    else:
        image, shape = encode_input_image(
            request.input_reference,
            model,
            _IMAGE_FIELD,
            lambda width, height: choose_shape(request, model, fps, model.choose_shape_like(width, height)),
        )
    spec, inputs = build_request(request, model, shape, f"video_{uuid.uuid4().hex}")
    return spec, replace(inputs, fps=fps, output_format=request.output_format, image=image)


def choose_shape(request: VideoRequest, model: ServedModel, fps: float, default: Shape) -> Shape:
    """The requested shape, with the size of `default` where none is named. Raises `InvalidRequestError`."""
    width, height, param = resolve_size(request, default)
    check_size(width, height, param, model)
    return Shape(height=height, width=width, num_frames=_choose_num_frames(request, model, fps, width * height))


def _choose_num_frames(request: VideoRequest, model: ServedModel, fps: float, pixels: int) -> int:
    """The requested number of frames, or else the allowed number that is nearest to the requested length.

    Raises `InvalidRequestError`."""
    limits, multiple = model.limits, model.family.frame_multiple
    if request.num_frames is not None:
        param, number = "num_frames", request.num_frames
        if not model.family.allows_frames(number):
            near = model.choose_frames_near(number)
            raise InvalidRequestError(
                f"num_frames: must be 1 plus a multiple of {multiple} for this model, such as {near}", "num_frames"
            )
    elif request.seconds is not None:
        param, number = "seconds", model.choose_frames_near(request.seconds * fps)
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
