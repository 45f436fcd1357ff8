"""Routes that clients know from other servers and that have no meaning here: each answer says what to use instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

REFUSED_ROUTES = {
    "POST /v1/images/variations": "no model here makes variations of an image alone: send it with a prompt to "
    "POST /v1/images/edits",
    "POST /v1/videos/{video_id}/remix": "a video cannot be changed once it is made: send the changed prompt to "
    "POST /v1/videos, with the same seed for a similar one",
}
METRICS_ROUTE = "GET /metrics"
# A text that Prometheus takes for no metrics, which is what they are here.
_METRICS = """\
# The metrics of this service (ray_tridentserve_*) are in those of Ray, which each node of the cluster exports itself.
# The addresses to scrape are in the file /tmp/ray/prom_metrics_service_discovery.json of the head node, which
# Prometheus reads by file_sd_configs. docs/metrics.md describes each metric; GET /health tells the state.
"""
_NOT_FOUND = 404  # not 501, which the openai client sends again and again


def add_refused_routes(api: FastAPI) -> None:
    """The OpenAPI document names none of those that are refused."""

    @api.get("/metrics", response_class=PlainTextResponse)
    async def point_to_metrics() -> PlainTextResponse:
        return PlainTextResponse(_METRICS, media_type="text/plain; version=0.0.4")

    for route, message in REFUSED_ROUTES.items():
        method, path = route.split()
        api.add_api_route(path, _make_refusal(message), methods=[method], include_in_schema=False)


def _make_refusal(message: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise HTTPException(_NOT_FOUND, message)

    return refuse
