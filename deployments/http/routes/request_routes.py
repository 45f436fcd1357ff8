"""The routes about one request by its id, of images and of videos."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from deployments.backend import Backend, VideoBackend
from deployments.http.python_handle import explain
from deployments.http.routes.video_routes import cancel_job
from deployments.schemas.common.generation_request import REQUEST_ID
from tridentserve.errors import RequestNotFoundError

REQUEST_ROUTES = ("DELETE /v1/requests/{request_id}", "GET /v1/requests/{request_id}/explain")


def add_request_routes(api: FastAPI, backend: Backend, videos: VideoBackend | None) -> None:
    """Without `videos` the service keeps no video jobs."""

    @api.delete("/v1/requests/{request_id}")
    async def cancel_request(request_id: str) -> dict[str, Any]:
        if not REQUEST_ID.fullmatch(request_id) or not (
            await backend.cancel(request_id) or await cancel_job(videos, request_id)
        ):
            raise RequestNotFoundError("no unfinished request has this id")
        return {"id": request_id, "object": "request.deleted", "deleted": True}

    @api.get("/v1/requests/{request_id}/explain")
    async def explain_request(request_id: str) -> dict[str, Any]:
        """The Python handle answers the same, by its method `explain`."""
        return await explain(backend, request_id)
