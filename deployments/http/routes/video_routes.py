"""The routes of videos: jobs that are submitted, looked up and fetched; and videos in one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import FileResponse, JSONResponse, Response

from deployments.backend import Backend, VideoBackend, wait_for_result
from deployments.http.body import FORMS, JSON, describe_body, read_fields, run_until_disconnect
from deployments.http.fact_headers import make_fact_headers
from deployments.http.video_files import MP4, VideoBytesResponse, VideoFileResponse
from deployments.models.served import ServedModel
from deployments.schemas.common.foreign_fields import describe_ignored
from deployments.schemas.common.generation_request import REQUEST_ID
from deployments.schemas.common.ignored_fields import list_ignored
from deployments.schemas.image_field import build_beside_loop, count_image_chars
from deployments.schemas.video import VideoRequest, build_video_request, parse_video_request
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
_BODY = describe_body(VideoRequest, JSON, *FORMS)


def add_video_routes(
    api: FastAPI,
    backend: Backend,
    models: Mapping[str, ServedModel],
    videos: VideoBackend | None,
    max_body_bytes: int,
    lenient: bool,
) -> None:
    """Jobs go to `videos`, requests that are answered at once to `backend`."""

    async def read_request(request: Request) -> tuple[RequestSpec, GenerationInputs, VideoRequest, dict[str, Any]]:
        sent = await read_fields(request, max_body_bytes, count_image_chars(models))
        body, known = parse_video_request(sent.values, not sent.is_form, lenient), dict(models)
        has_image = body.input_reference is not None
        spec, inputs = await build_beside_loop(lambda: build_video_request(body, known), has_image, sent.arrived_s)
        return spec, inputs, body, describe_ignored(list_ignored(body, known[spec.model], streams=False))

    def require_jobs(video_id: str) -> VideoBackend:
        """The service that may have this video. Raises `RequestNotFoundError` if there is none."""
        if videos is None or not REQUEST_ID.fullmatch(video_id):
            raise RequestNotFoundError("there is no video with this id")
        return videos

    @api.post("/v1/videos", openapi_extra=_BODY)
    async def submit_video(request: Request) -> Response:
        spec, inputs, body, ignored = await read_request(request)
        if videos is None:
            raise ConfigError("this service keeps no video jobs: give its configuration a `videos:` section")
        job = _add_url(await videos.submit(spec, inputs, body.priority), request)
        return JSONResponse(job | ignored)

    @api.post("/v1/videos/sync", openapi_extra=_BODY)
    async def make_video(request: Request) -> Response:
        spec, inputs, _, ignored = await read_request(request)
        if spec.num_outputs != 1:
            raise InvalidRequestError("n: must be 1 here, the answer is one file; POST /v1/videos takes more", "n")
        updates = backend.generate(spec, inputs, with_progress=False)
        update = await run_until_disconnect(request.receive, wait_for_result(updates))
        headers = {"X-Video-Id": update.request_id, **make_fact_headers(update, ignored)}
        return Response(update.outputs[0], media_type=MP4, headers=headers)

    @api.get("/v1/videos")
    async def list_videos(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        found, more = ([], False) if videos is None else await videos.list_page(after, limit, order == "desc")
        ids = [video["id"] for video in found]
        about = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None, "has_more": more}
        return {"object": "list", "data": [_add_url(video, request) for video in found], **about}

    @api.get("/v1/videos/{video_id}")
    async def get_video(video_id: str, request: Request) -> dict[str, Any]:
        return _add_url(await require_jobs(video_id).get(video_id), request)

    @api.get("/v1/videos/{video_id}/content", response_class=FileResponse)
    async def get_content(
        video_id: str, index: Annotated[int, Query(ge=0, le=1000)] = 0, variant: Literal["video"] = "video"
    ) -> Response:
        jobs, name = require_jobs(video_id), f"{video_id}{f'-{index}' if index else ''}.mp4"
        path = await jobs.find_local_file(video_id, index)
        if path is not None:
            return VideoFileResponse(path, name)
        return VideoBytesResponse(await jobs.read_content(video_id, index), name)

    @api.delete("/v1/videos/{video_id}")
    async def delete_video(video_id: str) -> dict[str, Any]:
        await require_jobs(video_id).delete(video_id)
        return {"id": video_id, "object": "video.deleted", "deleted": True}


def _add_url(video: dict[str, Any], request: Request) -> dict[str, Any]:
    """A job with the address of its content, once there is any."""
    if video["status"] != "completed":
        return video
    return {**video, "url": f"{str(request.base_url).rstrip('/')}/v1/videos/{video['id']}/content"}


async def cancel_job(videos: VideoBackend | None, request_id: str) -> bool:
    """Stop the job with this id. The result is False when no unfinished job has it."""
    try:
        return videos is not None and await videos.cancel(request_id)
    except RequestNotFoundError:
        return False
