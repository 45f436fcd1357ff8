"""The updates of a request as server-sent events (`stream: true`)."""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.backend import closing, raise_failure
from deployments.http.body import until_disconnect
from deployments.http.errors import body_of, internal_error
from deployments.http.plain_updates import to_plain
from tridentserve.engine.live.updates import CompletedUpdate, ProgressUpdate, QueuedUpdate, Update
from tridentserve.errors import TridentServeError

_Event = QueuedUpdate | ProgressUpdate | CompletedUpdate
_HEARTBEAT = b": waiting\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

logger = logging.getLogger(__name__)


class EventStreamResponse(Response):
    """Sends each update as an event, and a comment whenever nothing has come for `heartbeat_s` (proxies cut idle
    connections). The names of the events begin with `kind` and a dot.

    A request that is refused before its first update is answered with its error and status, not with a stream.
    Starlette's StreamingResponse would, on some servers, notice only at the next event that its client has left.
    """

    media_type = "text/event-stream"

    def __init__(self, updates: AsyncIterator[Update], heartbeat_s: float, kind: str) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._updates = raise_failure(updates)
        self._kind = kind
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientDisconnect:
            logger.debug("the client of a stream has left")

    async def _send_all(self, send: Send) -> None:
        async with closing(self._updates) as updates:
            first = await anext(updates)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": events_of(first, self._kind), "more_body": True})
            async for chunk in _chunks(updates, self._heartbeat_s, self._kind):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _chunks(updates: AsyncIterator[_Event], heartbeat_s: float, kind: str) -> AsyncIterator[bytes]:
    """The updates and pauses as bytes; what is raised becomes the last event, since the status is long sent."""
    waiting = asyncio.ensure_future(_next(updates))
    try:
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=heartbeat_s)
            if not done:
                yield _HEARTBEAT
                continue
            update = waiting.result()
            if update is None:
                return
            yield events_of(update, kind)
            waiting = asyncio.ensure_future(_next(updates))
    except TridentServeError as error:
        yield _event("error", body_of(error))
    except Exception:
        logger.exception("stream failed")
        yield _event("error", internal_error())
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _next(updates: AsyncIterator[_Event]) -> _Event | None:
    return await anext(updates, None)


def events_of(update: _Event, kind: str) -> bytes:
    """The event of an update; of a completed request, one event per image."""
    fields = to_plain(update)
    name = f"{kind}.{fields.pop('type')}"
    if not isinstance(update, CompletedUpdate):
        return _event(name, fields)
    images = fields.pop("images")
    return b"".join(
        _event(name, {**fields, "index": index, "b64_json": b64encode(image).decode()})
        for index, image in enumerate(images)
    )


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()
