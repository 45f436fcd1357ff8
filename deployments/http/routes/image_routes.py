"""The routes of images: those that come from a prompt, and edits; as one answer, or as a stream of events."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any
from zipfile import ZipFile

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from deployments.backend import Backend, wait_for_result
from deployments.http.body import FORMS, JSON, describe_body, read_fields, read_json, run_until_disconnect
from deployments.http.fact_headers import make_fact_headers
from deployments.http.sse import EventStreamResponse
from deployments.models.served import ServedModel
from deployments.plain_updates import to_plain
from deployments.schemas.common.foreign_fields import describe_ignored
from deployments.schemas.common.ignored_fields import list_ignored
from deployments.schemas.common.parsing import parse_as
from deployments.schemas.edit import EditRequest, build_images
from deployments.schemas.image import ImageRequest, parse_image_request
from deployments.schemas.image_field import count_image_chars
from tridentserve.engine.live.updates import CompletedUpdate

IMAGE_ROUTES = ("POST /v1/images/generations", "POST /v1/images/edits")
_IMAGE_BODY = describe_body(ImageRequest, JSON)
_EDIT_BODY = describe_body(EditRequest, JSON, *FORMS)


def add_image_routes(
    api: FastAPI,
    backend: Backend,
    models: Mapping[str, ServedModel],
    max_body_bytes: int,
    heartbeat_s: float,
    lenient: bool,
) -> None:
    """Streams send a comment after each `heartbeat_s` without an event."""

    @api.post("/v1/images/generations", openapi_extra=_IMAGE_BODY)
    async def create_images(request: Request) -> Response:
        asked = parse_image_request(await read_json(request, max_body_bytes), lenient)
        return await answer(request, asked, time.monotonic(), "image_generation")

    @api.post("/v1/images/edits", openapi_extra=_EDIT_BODY)
    async def edit_image(request: Request) -> Response:
        sent = await read_fields(request, max_body_bytes, count_image_chars(models))
        asked = parse_as(EditRequest, sent.values, not sent.is_form, lenient)
        return await answer(request, asked, sent.arrived_s, "image_edit")

    async def answer(request: Request, asked: ImageRequest, arrived_s: float, events: str) -> Response:
        known = dict(models)
        spec, inputs = await build_images(asked, known, arrived_s)
        ignored = list_ignored(asked, known[spec.model], asked.stream)
        updates = backend.generate(spec, inputs, with_progress=asked.stream)
        if asked.stream:
            return EventStreamResponse(updates, heartbeat_s, events, ignored)
        update = await run_until_disconnect(request.receive, wait_for_result(updates))
        if asked.wants_file:
            return _make_file(update, ignored)
        return JSONResponse(_describe_images(update, asked, ignored))


def _describe_images(update: CompletedUpdate, asked: ImageRequest, ignored: Sequence[str]) -> dict[str, Any]:
    """OpenAI's form, and in addition all that is known of the request."""
    about = {key: value for key, value in to_plain(update).items() if key not in ("type", "images", "created")}
    if asked.wants_urls:
        data = [{"url": url} for url in list_data_urls(update)]
    else:
        data = [{"b64_json": b64encode(image).decode()} for image in update.outputs]
    return {
        "created": update.created_s,
        "data": data,
        "output_format": update.output_format,
        "size": f"{update.shape.width}x{update.shape.height}",
        "usage": {"peak_memory_mb": about["peak_memory_mb"]},
        "metrics": {name: about[name] for name in ("stage_durations", "peak_memory_mb")},  # as vLLM-Omni has them
        **describe_ignored(ignored),
        **about,
    }


def _make_file(update: CompletedUpdate, ignored: Sequence[str]) -> Response:
    """The file of the image, or a ZIP file with those of several; headers have what is known of the request."""
    headers = {"X-Request-Id": update.request_id, **make_fact_headers(update, describe_ignored(ignored))}
    if len(update.outputs) == 1:
        return Response(update.outputs[0], media_type=f"image/{update.output_format}", headers=headers)
    packed = BytesIO()
    with ZipFile(packed, "w") as files:  # not compressed: images are
        for number, image in enumerate(update.outputs):
            files.writestr(f"image_{number}.{update.output_format}", image)
    return Response(packed.getvalue(), media_type="application/zip", headers=headers)


def list_data_urls(update: CompletedUpdate) -> list[str]:
    """The images of a result as texts that hold them."""
    head = f"data:image/{update.output_format};base64,"
    return [head + b64encode(image).decode() for image in update.outputs]
