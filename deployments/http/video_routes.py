"""The routes of videos: jobs that are submitted, asked about and fetched; and videos in one answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import FileResponse, JSONResponse, Response

from deployments.backend import Backend, VideoBackend, wait_for_result
from deployments.http.body import FORMS, JSON, openapi_body, read_fields, until_disconnect
from deployments.http.video_files import MP4, VideoContent, VideoFile
from deployments.models.served import ServedModel
from deployments.plain_updates import to_plain
from deployments.schemas.image import REQUEST_ID
from deployments.schemas.image_field import decoded, picture_bytes
from deployments.schemas.video import VideoRequest, parse_video, to_video_request
from tridentserve.engine.live.updates import CompletedUpdate
from tridentserve.errors import ConfigError, InvalidRequestError, RequestNotFoundError
from tridentserve.requests import GenerationInputs, RequestSpec

VIDEO_ROUTES = (
    "POST /v1/videos",
    "POST /v1/videos/sync",
    "GET /v1/videos",
    "GET /v1/videos/{video_id}",
    "GET /v1/videos/{video_id}/content",
    "DELETE /v1/videos/{video_id}",
)
# Proxies refuse answers with longer ones; only the timeline of a request that was stopped often is.
_MAX_HEADER_BYTES = 6144
_BODY = openapi_body(VideoRequest, JSON, *FORMS)


def add_video_routes(
    api: FastAPI,
    backend: Backend,
    models: Mapping[str, ServedModel],
    videos: VideoBackend | None,
    max_body_bytes: int,
) -> None:
    """Jobs go through `videos`; what is answered at once comes from `backend`."""

    async def asked(request: Request) -> tuple[VideoRequest, RequestSpec, GenerationInputs]:
        sent = await read_fields(request, max_body_bytes, picture_bytes(models))
        body, known = parse_video(sent.values, strict=not sent.is_form), dict(models)
        return body, *await decoded(lambda: to_video_request(body, known), body.input_reference, sent.arrived_s)

    def jobs_with(video_id: str) -> VideoBackend:
        """Those that may know of a video; none does when there are no jobs."""
        if videos is None or not REQUEST_ID.fullmatch(video_id):
            raise RequestNotFoundError("there is no video with this id")
        return videos

    @api.post("/v1/videos", openapi_extra=_BODY)
    async def submit_video(request: Request) -> Response:
        body, spec, inputs = await asked(request)
        if videos is None:
            raise ConfigError("this service keeps no video jobs: give its configuration a `videos:` section")
        return JSONResponse(_told(await videos.submit(spec, inputs, body.priority), request))

    @api.post("/v1/videos/sync", openapi_extra=_BODY)
    async def make_video(request: Request) -> Response:
        _, spec, inputs = await asked(request)
        if spec.num_outputs != 1:
            raise InvalidRequestError("n: must be 1 here, the answer is one file; POST /v1/videos takes more", "n")
        update = await until_disconnect(request.receive, wait_for_result(backend.generate(spec, inputs)))
        return Response(update.outputs[0], media_type=MP4, headers=_facts(update))

    @api.get("/v1/videos")
    async def list_videos(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        found, more = ([], False) if videos is None else await videos.page(after, limit, order == "desc")
        ids = [video["id"] for video in found]
        about = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None, "has_more": more}
        return {"object": "list", "data": [_told(video, request) for video in found], **about}

    @api.get("/v1/videos/{video_id}")
    async def get_video(video_id: str, request: Request) -> dict[str, Any]:
        return _told(await jobs_with(video_id).get(video_id), request)

    @api.get("/v1/videos/{video_id}/content", response_class=FileResponse)
    async def get_content(
        video_id: str, index: Annotated[int, Query(ge=0, le=1000)] = 0, variant: Literal["video"] = "video"
    ) -> Response:
        jobs, name = jobs_with(video_id), f"{video_id}{f'-{index}' if index else ''}.mp4"
        path = await jobs.find_local_file(video_id, index)
        if path is not None:
            return VideoFile(path, name)
        return VideoContent(await jobs.read_content(video_id, index), name)

    @api.delete("/v1/videos/{video_id}")
    async def delete_video(video_id: str) -> dict[str, Any]:
        await jobs_with(video_id).delete(video_id)
        return {"id": video_id, "object": "video.deleted", "deleted": True}


def _told(video: dict[str, Any], request: Request) -> dict[str, Any]:
    """With the address of its content, once there is any."""
    if video["status"] != "completed":
        return video
    return {**video, "url": f"{str(request.base_url).rstrip('/')}/v1/videos/{video['id']}/content"}


def _facts(update: CompletedUpdate) -> dict[str, str]:
    """What is known of a video that is answered at once, as headers: those that clients look for, and all in one."""
    told = to_plain(update)
    facts = {key: value for key, value in told.items() if key not in ("type", "videos", "timeline")}
    whole = json.dumps({**facts, "timeline": told["timeline"]})
    return {
        "X-Request-Facts": whole if len(whole) <= _MAX_HEADER_BYTES else json.dumps(facts),
        "X-Video-Id": update.request_id,
        "X-Model": update.model,
        "X-Seed": str(update.seed),
        "X-Inference-Time-S": str(update.latency_s),
        "X-Stage-Durations": json.dumps(update.stage_durations_s),
        "X-Peak-Memory-MB": str(facts["peak_memory_mb"]),
    }


async def cancel_job(videos: VideoBackend | None, request_id: str) -> bool:
    """Stop the job with this id; False when there is none that has not ended."""
    try:
        return videos is not None and await videos.cancel(request_id)
    except RequestNotFoundError:
        return False
