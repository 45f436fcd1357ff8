"""A small service on a real port of loopback, with real PNG and MP4 files: what the replay client is tested against."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import av
import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from PIL import Image

MODEL = "tiny-sd3"


@dataclass
class ImageService:
    """An image service that misbehaves by the `seed` of a request (`modes`; other seeds are served well), and keeps the
    requests that came.

    `num_answered`: requests beyond this number are held, as are all of them until `holds_until` have come in. A
    held request is answered once `let_go` is set, as it is at the end. `delay_s`: the least time that an answer takes.
    Modes: "error" (HTTP 500), "disconnect" (the connection is cut in the middle of the answer), "wrong-size",
    "truncated" (a damaged PNG), "not-json", "bad-timeline", "refuse" (HTTP 503, as for a request that would be late),
    "reduce" (one step less, in another quality). `modality` is what it says of its models; those of
    `takes_image` start from images; `paths` are the paths that the requests came in at.
    """

    num_answered: int | None = None
    holds_until: int = 0
    let_go: threading.Event = field(default_factory=threading.Event)
    delay_s: float = 0.0
    modes: dict[int, str] = field(default_factory=dict)
    models: list[str] = field(default_factory=lambda: [MODEL])
    modality: dict[str, str] = field(default_factory=dict)
    takes_image: set[str] = field(default_factory=set)
    healthy: bool = True
    slo_s: float | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""
    server: uvicorn.Server | None = None
    thread: threading.Thread | None = None

    def stop(self) -> None:
        """Goes away, as a crashed service does; once this returns nothing listens any more."""
        self.let_go.set()
        if self.server is not None and self.thread is not None:
            self.server.should_exit = True
            self.thread.join()

    def holds(self, number: int) -> bool:
        """True when request `number`, counted from 1, has to wait."""
        is_late = self.num_answered is not None and number > self.num_answered
        return not self.let_go.is_set() and (is_late or len(self.bodies) < self.holds_until)

    def answer(self, body: dict[str, Any], start_s: float) -> dict[str, Any]:
        width, height = map(int, body["size"].split("x"))
        mode = self.modes.get(body.get("seed", -1))
        encoded = png(width + (16 if mode == "wrong-size" else 0), height)
        if mode == "truncated":
            encoded = encoded[: len(encoded) // 2]
        told = self.facts(body, start_s, width, height)
        return {"created": int(start_s), "data": [{"b64_json": base64.b64encode(encoded).decode()}], **told}

    def facts(self, body: dict[str, Any], start_s: float, width: int, height: int) -> dict[str, Any]:
        mode = self.modes.get(body.get("seed", -1))
        degree = 2 if height > 64 else 1
        end_s = time.time()
        spans = [
            {"stage": "encode", "workers": ["w0"], "degree": 1, "start_s": start_s, "end_s": start_s + 0.001},
            {
                "stage": "diffuse",
                "workers": ["w1", "w2"][:degree],
                "degree": degree,
                "start_s": start_s + 0.001,
                "end_s": end_s,
                "steps": body["num_inference_steps"],
            },
            {"stage": "decode", "workers": ["w3"], "degree": 1, "start_s": end_s, "end_s": end_s + 0.001},
        ]
        if mode == "bad-timeline":
            spans[0]["degree"] = 0
        less = {"reduced_steps": body["num_inference_steps"] - 1, "quality": "fast"} if mode == "reduce" else {}
        return {
            **less,
            "stage_durations": {"encode": 0.001, "diffuse": 0.25, "decode": 0.002},
            "timeline": spans,
            "slo_s": self.slo_s,
            "slo_met": None if self.slo_s is None else True,
            "queue_s": 0.5,
            "peak_memory_mb": float(width),
        }


def png(width: int, height: int) -> bytes:
    """A image with noise in it, so that half of its bytes is not a whole image."""
    stream = io.BytesIO()
    Image.effect_noise((width, height), 50).convert("RGB").save(stream, "PNG")
    return stream.getvalue()


def mp4(width: int, height: int, num_frames: int) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for shade in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), shade, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def _app(service: ImageService) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.healthy else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        told: list[dict[str, Any]] = [
            {"id": name, "output_modality": service.modality.get(name)} for name in service.models
        ]
        for model in told:
            if model["id"] in service.takes_image:
                model["input_images"] = {"min": 1, "max": 1}
        return {"object": "list", "data": told}

    @app.post("/v1/images/edits")
    @app.post("/v1/images/generations")
    async def generate(request: Request) -> Response:
        start_s = time.time()
        body = await request.json()
        service.bodies.append(body)
        service.paths.append(request.url.path)
        number = len(service.bodies)
        await asyncio.sleep(service.delay_s)
        while service.holds(number):  # noqa: ASYNC110  # the test's thread changes it
            await asyncio.sleep(0.01)
        mode = service.modes.get(body.get("seed", -1))
        if mode == "error":
            return JSONResponse({"error": {"message": "out of\nmemory", "code": "oom"}}, status_code=500)
        if mode == "refuse":
            error = {"message": "it is predicted to end 3.50 s after its arrival", "code": "deadline_missed"}
            return JSONResponse({"error": error}, status_code=503)
        if mode == "not-json":
            return Response("<html>", media_type="text/html")
        answer = JSONResponse(service.answer(body, start_s))
        if mode == "disconnect":
            answer.headers["content-length"] = str(len(answer.body) + 1000)
        return answer

    @app.post("/v1/videos/sync")
    async def video(request: Request) -> Response:
        start_s = time.time()
        body = await request.json()
        service.bodies.append(body)
        service.paths.append(request.url.path)
        width, height = map(int, body["size"].split("x"))
        facts = json.dumps(service.facts(body, start_s, width, height))
        content = mp4(width, height, body["num_frames"])
        return Response(content, media_type="video/mp4", headers={"X-Request-Facts": facts})

    return app


@contextmanager
def running(service: ImageService) -> Iterator[ImageService]:
    """Serves it in a thread until the block ends, with its address in `url`."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(_app(service), log_level="critical", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    server = service.server = uvicorn.Server(config)
    service.thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    service.thread.start()
    try:
        service.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        while not server.started:
            time.sleep(0.005)
        yield service
    finally:
        service.stop()
        listener.close()
