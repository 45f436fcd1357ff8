"""The Python side of the API, for callers in other Ray applications: requests and results are plain dicts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from deployments.backend import Backend, closing, raise_failure, wait_for_result
from deployments.models.served import ServedModel
from deployments.plain_updates import to_plain
from deployments.schemas.common.foreign_fields import describe_ignored
from deployments.schemas.common.generation_request import REQUEST_ID
from deployments.schemas.common.ignored_fields import list_ignored
from deployments.schemas.common.model_choice import make_unknown_model_error, resolve_name
from deployments.schemas.common.parsing import parse_as
from deployments.schemas.edit import EditRequest, build_images
from deployments.schemas.image import ImageRequest, parse_image_request
from deployments.schemas.image_field import build_beside_loop
from deployments.schemas.quote import build_alternatives, describe_quotes, parse_quote_request
from deployments.schemas.video import HandleVideoRequest, build_video_request
from tridentserve.engine.live.updates import CompletedUpdate
from tridentserve.errors import RequestNotFoundError
from tridentserve.requests import GenerationInputs, RequestSpec

# The input images of a request for images, under the names that it may have.
_IMAGE_NAMES = ("image", "images", "image_reference")


async def generate(
    backend: Backend, models: Mapping[str, ServedModel], body: Mapping[str, Any], lenient: bool = True
) -> dict[str, Any]:
    """The result of one request, which is the "completed" update without its type. `images` holds the bytes of files; a
    model that makes videos returns `videos` (MP4 bytes) or, with `output_format: "frames"`, `frames` (arrays) instead.

    `body` has the fields of the HTTP API (`stream` and the fields about the answer's form have no effect here). The
    input image is bytes, or a text as over HTTP.
    Raises a `TridentServeError`: `InvalidRequestError`, `UnknownModelError`, `OverloadedError`, ...
    Cancelling the call stops the request.
    """
    spec, inputs, ignored = await _build_request(body, models, lenient, streams=False)
    result = to_plain(await wait_for_result(backend.generate(spec, inputs, with_progress=False)))
    del result["type"]
    return result | ignored


async def generate_stream(
    backend: Backend, models: Mapping[str, ServedModel], body: Mapping[str, Any], lenient: bool = True
) -> AsyncIterator[dict[str, Any]]:
    """The updates of one request as they come, "completed" last. Raises as `generate` does.

    Closing the iterator early stops the request.
    """
    spec, inputs, ignored = await _build_request(body, models, lenient, streams=True)
    async with closing(raise_failure(backend.generate(spec, inputs))) as updates:
        async for update in updates:
            yield to_plain(update) | (ignored if isinstance(update, CompletedUpdate) else {})


async def quote(
    backend: Backend, models: Mapping[str, ServedModel], body: Mapping[str, Any], lenient: bool = True
) -> dict[str, Any]:
    """When a request would be finished if it were made now: the answer of `POST /v1/quotes`, whose fields `body` has.
    Raises as `generate` does."""
    asked = parse_quote_request(body, lenient)
    alternatives = build_alternatives(asked, models)
    ignored = list_ignored(asked, models[alternatives[0].model], streams=True)
    quotes = await backend.quote(alternatives)
    return describe_quotes(alternatives, quotes) | describe_ignored(ignored)


async def explain(backend: Backend, request_id: str) -> dict[str, Any]:
    """Why a request ended when it did: the answer of `GET /v1/requests/{id}/explain`. Raises `RequestNotFoundError`."""
    if not REQUEST_ID.fullmatch(request_id):
        raise RequestNotFoundError("no request has such an id")
    return await backend.explain(request_id)


async def _build_request(
    body: Mapping[str, Any], models: Mapping[str, ServedModel], lenient: bool, streams: bool
) -> tuple[RequestSpec, GenerationInputs, dict[str, Any]]:
    """The request for the model that the body names, or else for the first model that takes an image if the body has
    one, or else for the first model; and what the result says of fields that have no effect."""
    model, known, arrived_s = _choose_model(body, models), dict(models), time.monotonic()
    if model is not None and model.makes_videos:
        video = parse_as(HandleVideoRequest, body, lenient=lenient)
        video = video.model_copy(update={"model": model.name})
        has_image = video.input_reference is not None
        built = await build_beside_loop(lambda: build_video_request(video, known), has_image, arrived_s)
        return *built, describe_ignored(list_ignored(video, model, streams))
    image: ImageRequest
    may_start = model is not None and (model.takes_image or model.family.image_start is not None)
    if model is not None and (model.needs_image or (may_start and _find_image(body, *_IMAGE_NAMES))):
        image = parse_as(EditRequest, body, lenient=lenient).model_copy(update={"model": model.name})
    else:
        image = parse_image_request(body, lenient)
    spec, inputs = await build_images(image, known, arrived_s)
    return spec, inputs, describe_ignored(list_ignored(image, known[spec.model], streams))


def _choose_model(body: Mapping[str, Any], models: Mapping[str, ServedModel]) -> ServedModel | None:
    """The model for a body; None where its `model` is no name. Raises `UnknownModelError` for a model that is not
    served, and while none is (the only one is being drained, for example)."""
    name = _merge(body).get("model")
    if isinstance(name, str):
        name = resolve_name(name, models)
    if not models or (isinstance(name, str) and name not in models):
        raise make_unknown_model_error(models)
    if name is not None:
        return models[name] if isinstance(name, str) else None
    has_image = {
        False: _find_image(body, *_IMAGE_NAMES),
        True: _find_image(body, "input_reference", "image_reference"),
    }
    from_image = [model for model in models.values() if has_image[model.makes_videos] and model.takes_image]
    has_mask = _find_image(body, "mask")
    alike = (model for model in from_image if model.allows_mask(has_mask))
    return next(alike, next(iter(from_image), next(iter(models.values()))))


def _merge(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**_as_mapping(_as_mapping(body).get("extra_body")), **_as_mapping(body)}


def _find_image(body: Mapping[str, Any], *names: str) -> bool:
    """True where the body has an input image under one of these names."""
    fields = _merge(body)
    return any(fields.get(name) is not None for name in names)


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
