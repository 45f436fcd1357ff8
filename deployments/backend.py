"""What the HTTP routes and the Python handle need of the service behind them, as a protocol.

Updates of one request, in order (plain values, but for the pictures or videos):

    {"type": "queued", "request_id"}
    {"type": "progress", "request_id", "step", "num_steps"}
    {"type": "completed", "request_id", "model", "images": [PNG bytes], "seed", "width", "height", "created", "queue_s",
     "latency_s", "slo_s", "slo_met", "stage_durations": {"encode", "diffuse", "decode"},
     "timeline": [{"stage", "workers", "degree", "start_s", "end_s", "steps"}], "peak_memory_mb"}
        of a video, with "videos": [MP4 bytes] or "frames": [(frames, height, width, 3) uint8] in place of "images", and
        "num_frames" and "fps"
    {"type": "failed", "request_id", "error": {"message", "type", "param", "code"}, "http_status"}
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from tridentserve.errors import InvalidRequestError, TridentServeError, error_class
from tridentserve.requests import GenerationInputs, RequestSpec

Update = dict[str, Any]
# The key of what was made, one of these.
OUTPUTS = frozenset({"images", "videos", "frames"})


class Backend(Protocol):
    """The service as its front ends see it. All it raises on purpose is a `TridentServeError`."""

    def generate(self, spec: RequestSpec, inputs: GenerationInputs) -> AsyncIterator[Update]:
        """The updates of one request; the last one has type "completed" or "failed".

        Closing the iterator early, or cancelling the task that waits for it, means that this client has left.
        A request that the service does not take at all raises before the first update (`OverloadedError`, say).
        """

    async def cancel(self, request_id: str) -> bool:
        """Stop a request; False when it is unknown or has ended."""

    async def health(self) -> dict[str, Any]:
        """{"status": "ready", "degraded" (with fewer workers than there should be) or another word for a service that
        cannot take requests, "workers": how many are ready, ...}."""


@asynccontextmanager
async def closing(updates: AsyncIterator[Update]) -> AsyncIterator[AsyncIterator[Update]]:
    """Closes the updates at the end in any case: like `contextlib.aclosing`, for iterators with or without `aclose`."""
    try:
        yield updates
    finally:
        aclose = getattr(updates, "aclose", None)
        if aclose is not None:
            await aclose()


async def outcome_of(updates: AsyncIterator[Update]) -> AsyncIterator[Update]:
    """The updates up to "completed". Raises what a "failed" one stands for; closes `updates` in any case."""
    async with closing(updates):
        async for update in updates:
            if update["type"] == "failed":
                raise error_of(update)
            yield update
            if update["type"] == "completed":
                return
    raise TridentServeError("the request ended without a result")


def error_of(update: Update) -> TridentServeError:
    """The exception that a "failed" update stands for, chosen by its code."""
    told = update["error"]
    kind = error_class(str(told.get("code")))
    message = str(told["message"])
    return kind(message, told.get("param")) if issubclass(kind, InvalidRequestError) else kind(message)
