"""The routes of the console: its page at `/`, the files of that page, and the live state of the cluster."""

from __future__ import annotations

import html
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from deployments.backend import Backend, closing
from deployments.console.cluster_feed import ClusterFeed
from deployments.console.shared_event import accepts_gzip
from deployments.http.body import run_until_disconnect

CONSOLE_ROUTES = ("GET /", "GET /v1/cluster/events")
_FILES = Path(__file__).parents[2] / "console" / "static"
PAGE_HEADERS = {
    # The page runs its own modules and talks to its own origin, whatever a prompt or an error contains. Images and
    # videos that it has received are blobs.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Files change with the service: browsers ask whether theirs are the latest.
    "Cache-Control": "no-cache",
}


def add_console_routes(api: FastAPI, backend: Backend, about: Mapping[str, Any], heartbeat_s: float) -> None:
    """`about`: the answer of `/` for those who do not ask for a page."""
    feed = ClusterFeed(backend.describe_cluster, heartbeat_s)
    page = (_FILES / "index.html").read_text(encoding="utf-8")
    api.mount("/console", _ConsoleFiles(directory=_FILES))

    @api.head("/", include_in_schema=False)
    @api.get("/")
    async def show(request: Request) -> Response:
        """The console for browsers, the list of routes for others."""
        if "text/html" not in request.headers.get("accept", ""):
            return JSONResponse(dict(about), headers={"Vary": "Accept"})
        # Behind a prefix, an address without a slash at its end would lead the page's own links astray.
        root = html.escape(request.scope.get("root_path", "").rstrip("/"))
        return HTMLResponse(
            page.replace('"./console/', f'"{root}/console/'), headers={**PAGE_HEADERS, "Vary": "Accept"}
        )

    @api.get("/v1/cluster/events")
    async def watch_cluster(request: Request) -> Response:
        """The live state of the cluster as server-sent events."""
        packs = accepts_gzip(request.headers.get("accept-encoding", ""))
        return _FeedResponse(feed.watch(packs), packs)


class _ConsoleFiles(StaticFiles):
    """The files of the page, with its headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(PAGE_HEADERS)
        return response


class _FeedResponse(Response):
    """Sends events without end, until the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], packed: bool) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "Vary": "Accept-Encoding"}
        super().__init__(headers=headers | ({"Content-Encoding": "gzip"} if packed else {}))
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await run_until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with closing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
