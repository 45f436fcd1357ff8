"""The HTTP routes as a FastAPI application over any `Backend`, which Ray Serve's ingress serves."""

from __future__ import annotations

import asyncio
import logging
import time
from base64 import b64encode
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from deployments.backend import Backend, VideoBackend, wait_for_result
from deployments.http.body import (
    FORMS,
    JSON,
    MAX_BODY_BYTES,
    describe_body,
    read_fields,
    read_json,
    run_until_disconnect,
)
from deployments.http.chat_routes import CHAT_ROUTES, add_chat_routes
from deployments.http.errors import install_error_handlers
from deployments.http.sse import EventStreamResponse
from deployments.http.video_routes import VIDEO_ROUTES, add_video_routes, cancel_job
from deployments.models.served import ServedModel
from deployments.plain_updates import to_plain
from deployments.schemas.edit import EditRequest, build_edit_request
from deployments.schemas.image import REQUEST_ID, ImageRequest, build_image_request, parse_as, parse_image_request
from deployments.schemas.image_field import build_beside_loop, count_image_chars
from deployments.schemas.model_choice import make_unknown_model_error
from tridentserve.engine.live.updates import CompletedUpdate
from tridentserve.errors import RequestNotFoundError
from tridentserve.requests import GenerationInputs, RequestSpec

HEARTBEAT_S = 10.0
HEALTH_TIMEOUT_S = 5.0
_SERVING = ("ready", "degraded")
_ROUTES = [
    "POST /v1/images/generations",
    "POST /v1/images/edits",
    *CHAT_ROUTES,
    *VIDEO_ROUTES,
    "DELETE /v1/requests/{request_id}",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /v1/model_info",
    "GET /health",
    "GET /ready",
    "GET /live",
    "GET /openapi.json",
]
_IMAGE_BODY = describe_body(ImageRequest, JSON)
_EDIT_BODY = describe_body(EditRequest, JSON, *FORMS)

logger = logging.getLogger(__name__)


def create_api(
    backend: Backend,
    models: Mapping[str, ServedModel],
    videos: VideoBackend | None = None,
    *,
    heartbeat_s: float = HEARTBEAT_S,
    max_body_bytes: int = MAX_BODY_BYTES,
    lenient: bool = True,
) -> FastAPI:
    """The routes over one backend. `models` is not empty; its first model is the default of requests. Without `videos`
    the service keeps no video jobs. Unless `lenient`, fields that have no effect are refused.

    A client that leaves closes the iterator of `backend.generate`, whether the server only reports it (uvicorn) or
    also cancels the handler (Ray Serve). No value of a request is ever logged, or repeated in an error.
    """
    # The interactive pages of FastAPI load scripts from other servers, so only /openapi.json stays.
    api = FastAPI(
        title="TridentServe", version=version("tridentserve"), docs_url=None, redoc_url=None, redirect_slashes=False
    )
    install_error_handlers(api)
    created = int(time.time())

    @api.post("/v1/images/generations", openapi_extra=_IMAGE_BODY)
    async def create_images(request: Request) -> Response:
        asked = parse_image_request(await read_json(request, max_body_bytes), lenient)
        return await answer_images(request, asked, build_image_request(asked, models), "image_generation")

    @api.post("/v1/images/edits", openapi_extra=_EDIT_BODY)
    async def edit_image(request: Request) -> Response:
        sent = await read_fields(request, max_body_bytes, count_image_chars(models))
        asked, known = parse_as(EditRequest, sent.values, not sent.is_form, lenient), dict(models)
        built = await build_beside_loop(lambda: build_edit_request(asked, known), asked.image, sent.arrived_s)
        return await answer_images(request, asked, built, "image_edit")

    async def answer_images(
        request: Request, asked: ImageRequest, built: tuple[RequestSpec, GenerationInputs], events: str
    ) -> Response:
        updates = backend.generate(*built, with_progress=asked.stream)
        if asked.stream:
            return EventStreamResponse(updates, heartbeat_s, events, asked.ignored)
        update = await run_until_disconnect(request.receive, wait_for_result(updates))
        return JSONResponse(_describe_images(update, asked))

    add_chat_routes(api, backend, models, max_body_bytes, lenient)
    add_video_routes(api, backend, models, videos, max_body_bytes, lenient)

    @api.delete("/v1/requests/{request_id}")
    async def cancel_request(request_id: str) -> dict[str, Any]:
        if not REQUEST_ID.fullmatch(request_id) or not (
            await backend.cancel(request_id) or await cancel_job(videos, request_id)
        ):
            raise RequestNotFoundError("no unfinished request has this id")
        return {"id": request_id, "object": "request.deleted", "deleted": True}

    def describe_model(name: str) -> dict[str, Any]:
        own = {"id": name, "object": "model", "created": created, "owned_by": "tridentserve"}
        return {**own, **models[name].to_json()}

    @api.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [describe_model(name) for name in models]}

    @api.get("/v1/models/{name}")
    async def get_model(name: str) -> dict[str, Any]:
        if name not in models:
            raise make_unknown_model_error(models)
        return describe_model(name)

    @api.get("/v1/model_info")
    @api.get("/model_info")
    async def get_default_model() -> dict[str, Any]:
        """As SGLang has it, whose benchmark asks for the name of the model here."""
        if not models:
            raise make_unknown_model_error(models)
        return {"model_path": next(iter(models))}

    @api.get("/health")
    @api.get("/ready")
    async def health() -> Response:
        state = await _check_health(backend)
        return JSONResponse(state, status_code=200 if state.get("status") in _SERVING else 503)

    @api.get("/live")
    async def live() -> dict[str, Any]:
        """This process answers, whatever the workers do."""
        return {"status": "live"}

    @api.get("/")
    async def about() -> dict[str, Any]:
        return {"name": api.title, "version": api.version, "routes": _ROUTES, "documentation": "docs/api.md"}

    return api


async def _check_health(backend: Backend) -> dict[str, Any]:
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            return await backend.get_health()
    except Exception as error:
        logger.info("health check failed: %s", type(error).__name__)
        return {"status": "unavailable", "workers": 0}


def _describe_images(update: CompletedUpdate, asked: ImageRequest) -> dict[str, Any]:
    """OpenAI's form, and in addition all that is known of the request."""
    about = {key: value for key, value in to_plain(update).items() if key not in ("type", "images", "created")}
    encoded = (b64encode(image).decode() for image in update.outputs)
    if asked.response_format == "url":
        data = [{"url": f"data:image/{update.output_format};base64,{text}"} for text in encoded]
    else:
        data = [{"b64_json": text} for text in encoded]
    return {
        "created": update.created_s,
        "data": data,
        "output_format": update.output_format,
        "size": f"{update.shape.width}x{update.shape.height}",
        "usage": {"peak_memory_mb": about["peak_memory_mb"]},
        **({"ignored": list(asked.ignored)} if asked.ignored else {}),
        **about,
    }
