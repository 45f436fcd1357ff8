"""The Python side of the API, for callers in other Ray applications: requests and results are plain dicts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from deployments.backend import Backend, closing, raise_failure, wait_for_result
from deployments.models.served import ServedModel
from deployments.plain_updates import to_plain
from deployments.schemas.edit import EditRequest, build_edit_request
from deployments.schemas.image import build_image_request, parse_as
from deployments.schemas.image_field import build_beside_loop
from deployments.schemas.model_choice import make_unknown_model_error
from deployments.schemas.video import HandleVideoRequest, build_video_request
from tridentserve.requests import GenerationInputs, RequestSpec


async def generate(backend: Backend, models: Mapping[str, ServedModel], body: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one request, which is the "completed" update without its type. `images` holds PNG bytes; a model
    that makes videos returns `videos` (MP4 bytes) or, with `output_format: "frames"`, `frames` (arrays) instead.

    `body` has the fields of the HTTP API (`stream` and the fields about the answer's form have no effect here). The
    input image is bytes, or a text as over HTTP.
    Raises a `TridentServeError`: `InvalidRequestError`, `UnknownModelError`, `OverloadedError`, ...
    Cancelling the call stops the request.
    """
    spec, inputs = await _build_request(body, models)
    result = to_plain(await wait_for_result(backend.generate(spec, inputs, with_progress=False)))
    del result["type"]
    return result


async def generate_stream(
    backend: Backend, models: Mapping[str, ServedModel], body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The updates of one request as they come, "completed" last. Raises as `generate` does.

    Closing the iterator early stops the request.
    """
    spec, inputs = await _build_request(body, models)
    async with closing(raise_failure(backend.generate(spec, inputs))) as updates:
        async for update in updates:
            yield to_plain(update)


async def _build_request(
    body: Mapping[str, Any], models: Mapping[str, ServedModel]
) -> tuple[RequestSpec, GenerationInputs]:
    """The request for the model that the body names, or else for the first model that takes an image if the body has
    one, or else for the first model."""
    model, known, arrived_s = _choose_model(body, models), dict(models), time.monotonic()
    if model is not None and model.makes_videos:
        video = parse_as(HandleVideoRequest, body).model_copy(update={"model": model.name})
        return await build_beside_loop(lambda: build_video_request(video, known), video.input_reference, arrived_s)
    if model is not None and model.takes_image:
        edit = parse_as(EditRequest, body).model_copy(update={"model": model.name})
        return await build_beside_loop(lambda: build_edit_request(edit, known), edit.image, arrived_s)
    return build_image_request(body, models)


def _choose_model(body: Mapping[str, Any], models: Mapping[str, ServedModel]) -> ServedModel | None:
    """The model for a body; None where its `model` is no name. Raises `UnknownModelError` for a model that is not
    served, and while none is (the only one is being drained, for example)."""
    fields = {**_as_mapping(_as_mapping(body).get("extra_body")), **_as_mapping(body)}
    name = fields.get("model")
    if not models or (isinstance(name, str) and name not in models):
        raise make_unknown_model_error(models)
    if name is not None:
        return models[name] if isinstance(name, str) else None
    sent_image = {False: fields.get("image", fields.get("images")), True: fields.get("input_reference")}
    from_image = (model for model in models.values() if sent_image[model.makes_videos] is not None)
    return next((model for model in from_image if model.takes_image), next(iter(models.values())))


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
