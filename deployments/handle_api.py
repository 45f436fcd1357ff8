"""The Python side of the API: plain dicts in, plain dicts out, for callers in other Ray applications."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from deployments.backend import Backend, Update, closing, outcome_of
from deployments.models import ServedModel
from deployments.schemas import to_request


async def generate(backend: Backend, models: Mapping[str, ServedModel], body: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one request: the "completed" update without its type; `images` holds PNG bytes.

    `body` has the fields of the HTTP API (`stream` and the fields about the answer's form have no effect here).
    Raises a `TridentServeError`: `InvalidRequestError`, `UnknownModelError`, `OverloadedError`, ...
    Cancelling the call stops the request.
    """
    spec, inputs = to_request(body, models)
    result = dict(await final_update(backend.generate(spec, inputs)))
    del result["type"]
    return result


async def generate_stream(
    backend: Backend, models: Mapping[str, ServedModel], body: Mapping[str, Any]
) -> AsyncIterator[Update]:
    """The updates of one request as they come, "completed" last. Raises as `generate` does.

    Closing the iterator early stops the request.
    """
    spec, inputs = to_request(body, models)
    async with closing(outcome_of(backend.generate(spec, inputs))) as updates:
        async for update in updates:
            yield update


async def final_update(updates: AsyncIterator[Update]) -> Update:
    """Waits for the "completed" update, and closes the iterator. Raises what a "failed" update stands for."""
    async with closing(outcome_of(updates)) as checked:
        return [update async for update in checked][-1]
