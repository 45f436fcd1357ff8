"""The body of a quote: a request that is not made, with the sizes, steps and qualities that are to be compared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from deployments.models.served import QUALITIES_BY_NAME, ServedModel
from deployments.schemas.common.building import build_request, check_limits, resolve_size
from deployments.schemas.common.generation_request import PlainText
from deployments.schemas.common.model_choice import check_size, make_unknown_model_error, resolve_name
from deployments.schemas.common.parsing import parse_as
from deployments.schemas.edit import start_from_image
from deployments.schemas.video import VideoRequest, choose_shape
from tridentserve.errors import InvalidRequestError
from tridentserve.requests import Quality, RequestSpec, Shape
from tridentserve.scheduling.events import Reject
from tridentserve.scheduling.prediction.predictor import Quote

# A quote takes the scheduler some milliseconds.
MAX_QUOTES = 16


def _read_quality(value: Any) -> Any:
    return QUALITIES_BY_NAME.get(value, value) if isinstance(value, str) else value


class QuoteRequest(VideoRequest):
    """The body of `POST /v1/quotes`: the fields of a request for images or a video that matter to its time, and lists
    of what is to be compared."""

    other_names: ClassVar[Mapping[str, str]] = {}
    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("image", "images", "input_reference"), "a quote depends on the size alone: give size, not the image"
    )

    prompt: PlainText = Field(default="", description="The field has no effect here.")
    sizes: list[PlainText] | None = Field(
        default=None, min_length=1, description="Sizes to quote, as `WxH`, in place of `size`."
    )
    steps: list[int] | None = Field(
        default=None,
        min_length=1,
        description="Numbers of denoising steps to quote, in place of `num_inference_steps`.",
    )
    qualities: list[Annotated[Quality, BeforeValidator(_read_quality)]] | None = Field(
        default=None, min_length=1, description="Qualities to quote, in place of `quality`."
    )
    strength: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="That of a request which starts from an image, of a model that makes images from text too. Without "
        "it the quote is of one that starts from text alone.",
    )
    stream: bool = Field(default=False, description="The field has no effect here.")
    output_format: PlainText | None = Field(  # type: ignore[assignment]
        default=None, description="The field has no effect here."
    )
    output_compression: int | None = Field(default=None, description="The field has no effect here.")
    response_format: PlainText | None = Field(default=None, description="The field has no effect here.")
    background: PlainText | None = Field(default=None, description="The field has no effect here.")


def parse_quote_request(body: Any, lenient: bool = True) -> QuoteRequest:
    """The body with `extra_body` merged in. Raises as `parse_as` does."""
    return parse_as(QuoteRequest, body, lenient=lenient)


def build_alternatives(request: QuoteRequest, models: Mapping[str, ServedModel]) -> list[RequestSpec]:
    """Each quality at each size with each number of steps. The default model is the first one. Raises
    `InvalidRequestError`, or its subclass `UnknownModelError`."""
    name = resolve_name(request.model, models)
    if not models or (name is not None and name not in models):
        raise make_unknown_model_error(models)
    model = next(iter(models.values())) if name is None else models[name]
    if request.sizes is not None and (request.size is not None or request.width is not None):
        raise InvalidRequestError("sizes: give either sizes or one size", "sizes")
    if request.steps is not None and request.num_inference_steps is not None:
        raise InvalidRequestError("steps: give either steps or num_inference_steps", "steps")
    sizes: list[str | None] = [*request.sizes] if request.sizes is not None else [request.size]
    steps: list[int | None] = [*request.steps] if request.steps is not None else [request.num_inference_steps]
    if request.qualities is not None and request.quality != "auto":
        raise InvalidRequestError("qualities: give either qualities or one quality", "qualities")
    qualities = list(dict.fromkeys(request.qualities or [model.choose_quality(request.quality)]))
    if len(qualities) * len(sizes) * len(steps) > MAX_QUOTES:
        raise InvalidRequestError(
            f"sizes: at most {MAX_QUOTES} combinations of qualities, sizes and steps are quoted at once", "sizes"
        )
    return [
        _build_spec(request, size, number, quality, model) for quality, size, number in product(qualities, sizes, steps)
    ]


def _build_spec(
    request: QuoteRequest, size: str | None, steps: int | None, quality: Quality, model: ServedModel
) -> RequestSpec:
    if steps is not None and steps < 1:
        raise InvalidRequestError("steps: each must be at least 1", "steps")
    one = request.model_copy(update={"size": size, "num_inference_steps": steps, "quality": quality})
    check_limits(one, model)
    if model.makes_videos:
        shape = choose_shape(one, model, one.fps or float(model.default_fps), model.default_shape)
    else:
        width, height, param = resolve_size(one, Shape(model.default_side, model.default_side))
        check_size(width, height, param, model)
        shape = Shape(height=height, width=width)
    spec, inputs = build_request(one, model, shape, "quote")
    return spec if one.strength is None else start_from_image(spec, inputs, one.strength, model)[0]


def describe_quotes(alternatives: Sequence[RequestSpec], quotes: Sequence[Quote | Reject | None]) -> dict[str, Any]:
    """The answer: one entry for each alternative."""
    now_s = time.time()
    entries = [_describe_quote(each, quote, now_s) for each, quote in zip(alternatives, quotes, strict=True)]
    return {"object": "list", "created": int(now_s), "data": entries}


def _describe_quote(spec: RequestSpec, quote: Quote | Reject | None, now_s: float) -> dict[str, Any]:
    shape = spec.shape
    about: dict[str, Any] = {
        "object": "quote",
        "model": spec.model,
        "quality": spec.quality,
        "size": f"{shape.width}x{shape.height}",
        "num_frames": shape.num_frames,
        "num_inference_steps": spec.num_inference_steps,
        "n": spec.num_outputs,
        "predicted_s": None,
        "finish_at": None,
        "slo_s": spec.slo_s,
        "slo_met": None,
        "is_guess": None,
        "error": None,
    }
    match quote:
        case Reject():
            about["error"] = {"code": quote.code, "message": quote.reason}
        case Quote():
            about |= {
                "predicted_s": quote.seconds,
                "finish_at": now_s + quote.seconds,
                "slo_s": quote.slo_s,
                "slo_met": not quote.is_late,
                "is_guess": quote.is_guess,
            }
        case None:
            about["error"] = {"code": "no_prediction", "message": "no live worker could run it at the moment"}
    return about
