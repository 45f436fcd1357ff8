"""Ways to reach the API in tests: in this process, or as a real server on a free port of loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from deployments.backend import VideoBackend
from deployments.http.app import create_api
from tests.deployments.fake_backend import MODELS, WITH_IMAGES, WITH_VIDEOS, FakeBackend
from tests.support.waiting import until

IMAGES = "/v1/images/generations"


def make_api(backend: FakeBackend, heartbeat_s: float = 10.0) -> FastAPI:
    return create_api(backend, MODELS, heartbeat_s=heartbeat_s)


def open_client(backend: FakeBackend) -> httpx.AsyncClient:
    """Calls the application directly. Answers come as a whole: streams and disconnects need `served`."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_api(backend)), base_url="http://test")


def open_video_client(backend: FakeBackend, videos: VideoBackend | None) -> httpx.AsyncClient:
    """Return a client like that of `open_client`, with a model that makes videos and the service of their jobs."""
    app = create_api(backend, WITH_VIDEOS, videos)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def open_image_client(backend: FakeBackend, videos: VideoBackend | None = None) -> httpx.AsyncClient:
    """Return a client like that of `open_video_client`, with models that start from an image too."""
    app = create_api(backend, WITH_IMAGES, videos)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@asynccontextmanager
async def served(backend: FakeBackend, heartbeat_s: float = 10.0, app: FastAPI | None = None) -> AsyncIterator[int]:
    """The port of a real uvicorn server, of `api` unless another `app` is given."""
    config = uvicorn.Config(app or make_api(backend, heartbeat_s), host="127.0.0.1", port=0, ws="none", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


def make_raw_request(body: dict[str, Any]) -> bytes:
    """A whole POST as bytes, for clients that misbehave."""
    content = json.dumps(body).encode()
    head = f"POST {IMAGES} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def parse_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of server-sent events, comments left out."""
    found = []
    for block in text.strip().split("\n\n"):
        if not block.startswith(":"):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def get_error(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, once its form is right."""
    content = answer.json()
    assert set(content) == {"error"}
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = content["error"]
    return error
