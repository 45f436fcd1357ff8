"""A process of clients (an actor of Ray's), which call the real HTTP application in it without a server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.config.models import Limits
from deployments.http.app import create_api
from deployments.models.served import ServedModel
from deployments.serve.remote_backend import RemoteBackend
from lib.control_plane.logical_workers import read_usage
from tridentserve.engine.simulated import TimedRequest
from tridentserve.models.families import FAMILIES

_PATH = "/v1/images/generations"


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request; times in seconds from when it was due."""

    request_id: str
    latency_s: float
    late_s: float
    """The time by which it was sent too late, because this process had no time."""
    queue_s: float | None
    """Seconds from its arrival at the Scheduler to its first stage."""
    error: str | None


class ClientProcess:
    """Sends its share of a trace in an open loop."""

    def __init__(self, scheduler: Any, model: str, family: str) -> None:
        """`scheduler` is the handle of a `ControlPlaneScheduler`."""
        limits = Limits(max_side=4096, max_pixels=4096 * 4096)
        served = ServedModel(model, FAMILIES[family], limits)
        self._app = create_api(RemoteBackend(scheduler), {model: served})

    async def read_usage(self) -> tuple[float, int]:
        """CPU seconds of this process so far, and its resident bytes."""
        return read_usage()

    async def send(self, arrivals: Sequence[TimedRequest], begin_s: float, stream: bool) -> list[Answer]:
        """Send these requests, each at its time after `begin_s` (Unix clock), and wait for all answers."""
        tasks = []
        for at_s, spec in arrivals:
            due_s = begin_s + at_s
            await asyncio.sleep(max(0.0, due_s - time.time()))
            body = {
                "prompt": f"a lighthouse, number {spec.request_id}",
                "size": f"{spec.shape.width}x{spec.shape.height}",
                "num_inference_steps": spec.num_inference_steps,
                "request_id": spec.request_id,
                "slo_ms": 1000 * spec.slo_s if spec.slo_s is not None else None,
                "seed": 1,
                "stream": stream,
            }
            tasks.append(asyncio.create_task(self._ask(spec.request_id, body, due_s)))
        return await asyncio.gather(*tasks)

    async def _ask(self, request_id: str, body: dict[str, Any], due_s: float) -> Answer:
        sent_s = time.time()
        status, content = await _call(self._app, json.dumps(body).encode())
        latency_s, late_s = time.time() - due_s, sent_s - due_s
        if status != 200:
            return Answer(request_id, latency_s, late_s, None, content.decode(errors="replace")[:200])
        if body["stream"]:
            return Answer(request_id, latency_s, late_s, None, None if b"completed" in content else "cut short")
        return Answer(request_id, latency_s, late_s, json.loads(content)["queue_s"], None)


async def _call(app: Any, body: bytes) -> tuple[int, bytes]:
    """The status and the content of the answer of an ASGI application."""
    sent = False
    status, parts = 0, []
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await gone.wait()
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": _PATH,
        "raw_path": _PATH.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    await app(scope, receive, send)
    return status, b"".join(parts)
