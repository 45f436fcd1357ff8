"""The Python side of the API: plain dicts in, plain dicts out, for callers in other Ray applications."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from deployments.backend import Backend, Update, closing, outcome_of
from deployments.models import ServedModel
from deployments.schemas import parse_as, to_request
from deployments.video_schemas import HandleVideoRequest, to_video_request
from tridentserve.requests import GenerationInputs, RequestSpec


async def generate(backend: Backend, models: Mapping[str, ServedModel], body: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one request: the "completed" update without its type; `images` holds PNG bytes, of a model that
    makes videos `videos` MP4 bytes, or `frames` arrays with `output_format: "frames"`.

    `body` has the fields of the HTTP API (`stream` and the fields about the answer's form have no effect here).
    Raises a `TridentServeError`: `InvalidRequestError`, `UnknownModelError`, `OverloadedError`, ...
    Cancelling the call stops the request.
    """
    spec, inputs = _asked(body, models)
    result = dict(await final_update(backend.generate(spec, inputs)))
    del result["type"]
    return result


async def generate_stream(
    backend: Backend, models: Mapping[str, ServedModel], body: Mapping[str, Any]
) -> AsyncIterator[Update]:
    """The updates of one request as they come, "completed" last. Raises as `generate` does.

    Closing the iterator early stops the request.
    """
    spec, inputs = _asked(body, models)
    async with closing(outcome_of(backend.generate(spec, inputs))) as updates:
        async for update in updates:
            yield update


def _asked(body: Mapping[str, Any], models: Mapping[str, ServedModel]) -> tuple[RequestSpec, GenerationInputs]:
    """A request of a picture or of a video, as the model makes that the body names, else the first one."""
    fields = {**_mapping(_mapping(body).get("extra_body")), **_mapping(body)}
    name = fields.get("model")
    model = next(iter(models.values())) if name is None else models.get(name) if isinstance(name, str) else None
    if model is not None and model.makes_videos:
        asked = parse_as(HandleVideoRequest, body).model_copy(update={"model": model.name})
        return to_video_request(asked, models)
    return to_request(body, models)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


async def final_update(updates: AsyncIterator[Update]) -> Update:
    """Waits for the "completed" update, and closes the iterator. Raises what a "failed" update stands for."""
    async with closing(outcome_of(updates)) as checked:
        return [update async for update in checked][-1]
