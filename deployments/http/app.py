"""The HTTP routes as a FastAPI application over any `Backend`, which Ray Serve's ingress serves."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from fastapi import FastAPI

from deployments.backend import Backend, VideoBackend
from deployments.http.body import MAX_BODY_BYTES
from deployments.http.errors import install_error_handlers
from deployments.http.routes.chat_routes import CHAT_ROUTES, add_chat_routes
from deployments.http.routes.console_routes import CONSOLE_ROUTES, add_console_routes
from deployments.http.routes.handle_routes import HANDLE_ROUTES, HandleAddress, add_handle_routes
from deployments.http.routes.image_routes import IMAGE_ROUTES, add_image_routes
from deployments.http.routes.lora_routes import LORA_ROUTES, add_lora_routes
from deployments.http.routes.quote_routes import QUOTE_ROUTES, add_quote_routes
from deployments.http.routes.reference_routes import REFERENCE_ROUTES, add_reference_routes
from deployments.http.routes.refused_routes import METRICS_ROUTE, add_refused_routes
from deployments.http.routes.request_routes import REQUEST_ROUTES, add_request_routes
from deployments.http.routes.service_routes import SERVICE_ROUTES, add_service_routes
from deployments.http.routes.video_routes import VIDEO_ROUTES, add_video_routes
from deployments.models.served import ServedModel

HEARTBEAT_S = 10.0
_ROUTES = (
    *IMAGE_ROUTES,
    *CHAT_ROUTES,
    *VIDEO_ROUTES,
    *QUOTE_ROUTES,
    *REQUEST_ROUTES,
    *SERVICE_ROUTES,
    *LORA_ROUTES,
    *HANDLE_ROUTES,
    *CONSOLE_ROUTES,
    *REFERENCE_ROUTES,
    METRICS_ROUTE,
    "GET /openapi.json",
)


def create_api(
    backend: Backend,
    models: Mapping[str, ServedModel],
    videos: VideoBackend | None = None,
    *,
    heartbeat_s: float = HEARTBEAT_S,
    max_body_bytes: int = MAX_BODY_BYTES,
    lenient: bool = True,
    handle: HandleAddress | None = None,
) -> FastAPI:
    """The routes over one backend. `models` is not empty; its first model is the default of requests. Without `videos`
    the service keeps no video jobs. Unless `lenient`, fields that have no effect are refused. `handle` says where the
    Python handle of the same service is, None where it has none.

    A client that leaves closes the iterator of `backend.generate`, whether the server only reports it (uvicorn) or
    also cancels the handler (Ray Serve). No value of a request is ever logged, or repeated in an error.
    """
    # The interactive pages of FastAPI load scripts from other servers.
    api = FastAPI(
        title="TridentServe", version=version("tridentserve"), docs_url=None, redoc_url=None, redirect_slashes=False
    )
    install_error_handlers(api)
    add_image_routes(api, backend, models, max_body_bytes, heartbeat_s, lenient)
    add_chat_routes(api, backend, models, max_body_bytes, lenient)
    add_video_routes(api, backend, models, videos, max_body_bytes, lenient)
    add_quote_routes(api, backend, models, max_body_bytes, lenient)
    add_request_routes(api, backend, videos)
    add_lora_routes(api, backend, models, max_body_bytes)  # before the service's: `/v1/models/{name}` matches these too
    add_service_routes(api, backend, models)
    add_handle_routes(api, handle)
    add_refused_routes(api)
    about = {"name": api.title, "version": api.version, "routes": _ROUTES, "documentation": "docs/api.md"}
    add_console_routes(api, backend, about, heartbeat_s)
    add_reference_routes(api)
    return api
