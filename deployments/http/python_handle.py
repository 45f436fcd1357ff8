"""The Python side of the API: plain dicts in, plain dicts out, for callers in other Ray applications."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from deployments.backend import Backend, closing, raise_failure, wait_for_result
from deployments.models.served import ServedModel
from deployments.plain_updates import to_plain
from deployments.schemas.edit import EditRequest, to_edit_request
from deployments.schemas.image import not_served, parse_as, to_request
from deployments.schemas.image_field import decoded
from deployments.schemas.video import HandleVideoRequest, to_video_request
from tridentserve.requests import GenerationInputs, RequestSpec


async def generate(backend: Backend, models: Mapping[str, ServedModel], body: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one request: the "completed" update without its type; `images` holds PNG bytes, of a model that
    makes videos `videos` MP4 bytes, or `frames` arrays with `output_format: "frames"`.

    `body` has the fields of the HTTP API (`stream` and the fields about the answer's form have no effect here); a
    picture to start from is bytes, or a text as over HTTP.
    Raises a `TridentServeError`: `InvalidRequestError`, `UnknownModelError`, `OverloadedError`, ...
    Cancelling the call stops the request.
    """
    spec, inputs = await _asked(body, models)
    result = to_plain(await wait_for_result(backend.generate(spec, inputs)))
    del result["type"]
    return result


async def generate_stream(
    backend: Backend, models: Mapping[str, ServedModel], body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The updates of one request as they come, "completed" last. Raises as `generate` does.

    Closing the iterator early stops the request.
    """
    spec, inputs = await _asked(body, models)
    async with closing(raise_failure(backend.generate(spec, inputs))) as updates:
        async for update in updates:
            yield to_plain(update)


async def _asked(body: Mapping[str, Any], models: Mapping[str, ServedModel]) -> tuple[RequestSpec, GenerationInputs]:
    """A request as the model makes it that the body names; else the first one that starts from a picture, where the
    body has one; else the first one."""
    model, known, arrived_s = _model(body, models), dict(models), time.monotonic()
    if model is not None and model.makes_videos:
        video = parse_as(HandleVideoRequest, body).model_copy(update={"model": model.name})
        return await decoded(lambda: to_video_request(video, known), video.input_reference, arrived_s)
    if model is not None and model.takes_image:
        edit = parse_as(EditRequest, body).model_copy(update={"model": model.name})
        return await decoded(lambda: to_edit_request(edit, known), edit.image, arrived_s)
    return to_request(body, models)


def _model(body: Mapping[str, Any], models: Mapping[str, ServedModel]) -> ServedModel | None:
    """None where what the body names is no name. Raises `UnknownModelError` for one that is not served, and while none
    is: the only one is being drained, say."""
    fields = {**_mapping(_mapping(body).get("extra_body")), **_mapping(body)}
    name = fields.get("model")
    if not models or (isinstance(name, str) and name not in models):
        raise not_served(models)
    if name is not None:
        return models[name] if isinstance(name, str) else None
    has_picture = {False: fields.get("image", fields.get("images")), True: fields.get("input_reference")}
    from_picture = (model for model in models.values() if has_picture[model.makes_videos] is not None)
    return next((model for model in from_picture if model.takes_image), next(iter(models.values())))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
