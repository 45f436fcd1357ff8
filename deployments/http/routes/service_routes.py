"""The routes that say what is served, and whether the service is well."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from deployments.backend import Backend
from deployments.models.served import ServedModel
from deployments.schemas.common.model_choice import make_unknown_model_error

HEALTH_TIMEOUT_S = 5.0
_SERVING = ("ready", "degraded")
SERVICE_ROUTES = (
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /v1/model_info",
    "GET /health",
    "GET /ready",
    "GET /live",
)

logger = logging.getLogger(__name__)


def add_service_routes(api: FastAPI, backend: Backend, models: Mapping[str, ServedModel]) -> None:
    """`models` may change while the service runs."""
    created = int(time.time())

    def describe_model(name: str) -> dict[str, Any]:
        own = {"id": name, "object": "model", "created": created, "owned_by": "tridentserve"}
        return {**own, **models[name].to_json()}

    @api.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [describe_model(name) for name in models]}

    @api.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        """The name may have a `/`, plain or as %2F."""
        if not name:
            raise HTTPException(404)  # /v1/models/ is no route
        if name not in models:
            raise make_unknown_model_error(models)
        return describe_model(name)

    @api.get("/v1/model_info")
    @api.get("/model_info")
    async def get_default_model() -> dict[str, Any]:
        """The folder of the first model, or its id on the hub, as SGLang has it. Its benchmark looks there for the kind
        of the model, and names the model so in its requests."""
        if not models:
            raise make_unknown_model_error(models)
        model = next(iter(models.values()))
        return {"model_path": model.origin or model.name}

    @api.head("/health", include_in_schema=False)
    @api.head("/ready", include_in_schema=False)
    @api.get("/health")
    @api.get("/ready")
    async def health() -> Response:
        state = await _check_health(backend)
        return JSONResponse(state, status_code=200 if state.get("status") in _SERVING else 503)

    @api.head("/live", include_in_schema=False)
    @api.get("/live")
    async def live() -> dict[str, Any]:
        """This process answers, whatever the workers do."""
        return {"status": "live"}


async def _check_health(backend: Backend) -> dict[str, Any]:
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            return await backend.get_health()
    except Exception as error:
        logger.debug("health check failed: %s", type(error).__name__)
        return {"status": "unavailable", "workers": 0}
