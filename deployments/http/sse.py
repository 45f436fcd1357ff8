"""The updates of a request as server-sent events (`stream: true`)."""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.sse import format_sse_event
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.backend import closing, raise_failure
from deployments.http.body import run_until_disconnect
from deployments.openai_errors import describe_defect, describe_error
from deployments.plain_updates import to_plain
from deployments.schemas.common.foreign_fields import describe_ignored
from tridentserve.engine.live.updates import CompletedUpdate, PreviewUpdate, StreamedUpdate, Update
from tridentserve.errors import TridentServeError

_HEARTBEAT = format_sse_event(comment="waiting")
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

logger = logging.getLogger(__name__)


class EventStreamResponse(Response):
    """Sends each update as an event, and a comment after each `heartbeat_s` without one (proxies cut idle connections).

    A request that is refused before its first update is answered with its error and status, not with a stream.
    Starlette's StreamingResponse would, on some servers, notice only at the next event that its client has left.
    """

    media_type = "text/event-stream"

    def __init__(
        self, updates: AsyncIterator[Update], heartbeat_s: float, kind: str, ignored: Sequence[str] = ()
    ) -> None:
        """The names of the events begin with `kind` and a dot. The last ones name the fields of the request that were
        `ignored`, if there are any."""
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._updates = raise_failure(updates)
        self._kind = kind
        self._heartbeat_s = heartbeat_s
        self._ignored = ignored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send_all(send))
        except ClientDisconnect:
            logger.debug("the client of a stream has left")

    async def _send_all(self, send: Send) -> None:
        async with closing(self._updates) as updates:
            first = await anext(updates)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._encode(first), "more_body": True})
            async for chunk in self._encode_all(updates):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _encode_all(self, updates: AsyncIterator[StreamedUpdate]) -> AsyncIterator[bytes]:
        """The updates and pauses as bytes. An exception becomes the last event, because the status has been sent."""
        waiting = asyncio.ensure_future(_get_next(updates))
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=self._heartbeat_s)
                if not done:
                    yield _HEARTBEAT
                    continue
                update = waiting.result()
                if update is None:
                    return
                yield self._encode(update)
                waiting = asyncio.ensure_future(_get_next(updates))
        except TridentServeError as error:
            yield _encode_event("error", {"error": describe_error(error)})
        except Exception:
            logger.exception("stream failed")
            yield _encode_event("error", {"error": describe_defect()})
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    def _encode(self, update: StreamedUpdate) -> bytes:
        return encode_update(update, self._kind, self._ignored)


async def _get_next(updates: AsyncIterator[StreamedUpdate]) -> StreamedUpdate | None:
    return await anext(updates, None)


def encode_update(update: StreamedUpdate, kind: str, ignored: Sequence[str] = ()) -> bytes:
    """The event of an update; of a preview and of a completed request, one event per image."""
    fields = to_plain(update)
    name = f"{kind}.{fields.pop('type')}"
    if not isinstance(update, PreviewUpdate | CompletedUpdate):
        return _encode_event(name, fields)
    images = fields.pop("images")
    if isinstance(update, CompletedUpdate):
        fields |= describe_ignored(ignored)
    return b"".join(
        _encode_event(name, {**fields, "index": index, "b64_json": b64encode(image).decode()})
        for index, image in enumerate(images)
    )


def _encode_event(name: str, data: dict[str, Any]) -> bytes:
    return format_sse_event(event=name, data_str=json.dumps({"type": name, **data}))
