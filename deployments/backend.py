"""What the HTTP routes and the Python handle need of the service behind them, as a protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from tridentserve.engine.live.updates import CompletedUpdate, FailedUpdate, ProgressUpdate, QueuedUpdate, Update
from tridentserve.errors import TridentServeError, make_error
from tridentserve.requests import GenerationInputs, RequestSpec

U = TypeVar("U")


class Backend(Protocol):
    """The service as its front ends see it. All it raises on purpose is a `TridentServeError`."""

    def generate(self, spec: RequestSpec, inputs: GenerationInputs) -> AsyncIterator[Update]:
        """The updates of one request; the last one is a `CompletedUpdate` or a `FailedUpdate`.

        Closing the iterator early, or cancelling the task that waits for it, means that this client has left.
        A request that the service does not take at all raises before the first update (`OverloadedError`, say).
        """

    async def cancel(self, request_id: str) -> bool:
        """Stop a request; False when it is unknown or has ended."""

    async def health(self) -> dict[str, Any]:
        """{"status": "ready", "degraded" (with fewer workers than there should be) or another word for a service that
        cannot take requests, "workers": how many are ready, ...}."""


@asynccontextmanager
async def closing(updates: AsyncIterator[U]) -> AsyncIterator[AsyncIterator[U]]:
    """Closes the updates at the end in any case: like `contextlib.aclosing`, for iterators with or without `aclose`."""
    try:
        yield updates
    finally:
        aclose = getattr(updates, "aclose", None)
        if aclose is not None:
            await aclose()


async def raise_failure(
    updates: AsyncIterator[Update],
) -> AsyncIterator[QueuedUpdate | ProgressUpdate | CompletedUpdate]:
    """The updates up to the `CompletedUpdate`. Raises the error of a `FailedUpdate`; closes `updates` in any case."""
    async with closing(updates):
        async for update in updates:
            if isinstance(update, FailedUpdate):
                raise make_error(update.code, update.message, update.param)
            yield update
            if isinstance(update, CompletedUpdate):
                return
    raise TridentServeError("the request ended without a result")


async def wait_for_result(updates: AsyncIterator[Update]) -> CompletedUpdate:
    """The last update; closes the iterator. Raises the error of a `FailedUpdate`."""
    async with closing(raise_failure(updates)) as checked:
        completed = [update async for update in checked if isinstance(update, CompletedUpdate)]
    return completed[0]
