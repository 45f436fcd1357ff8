"""The routes of a model's LoRAs: whoever has the administrator's token adds and removes them while the service runs."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request

from deployments.backend import Backend
from deployments.http.body import JSON, describe_body, read_json
from deployments.models.served import ServedModel
from deployments.schemas.common.lora import NewLora, parse_new_lora, require_lora
from deployments.schemas.common.model_choice import make_unknown_model_error
from tridentserve.errors import AdminDisabledError, UnauthorizedError
from tridentserve.models.lora_files import LoraFile

LORA_ROUTES = (
    "GET /v1/models/{model}/loras",
    "POST /v1/models/{model}/loras",
    "DELETE /v1/models/{model}/loras/{name}",
)
ADMIN_TOKEN = "TRIDENTSERVE_ADMIN_TOKEN"
_BODY = describe_body(NewLora, JSON)


def add_lora_routes(api: FastAPI, backend: Backend, models: Mapping[str, ServedModel], max_body_bytes: int) -> None:
    """`models` may change while the service runs. The token is that of the environment at the time of a request.

    A model's name may have a `/`. These routes are added before `GET /v1/models/{name}`, which would match theirs."""

    def find_model(name: str) -> ServedModel:
        if name not in models:
            raise make_unknown_model_error(models)
        return models[name]

    @api.get("/v1/models/{model:path}/loras")
    async def list_loras(model: str) -> dict[str, Any]:
        return {"object": "list", "data": [_describe(lora) for lora in find_model(model).loras]}

    @api.post("/v1/models/{model:path}/loras", openapi_extra=_BODY)
    async def add_lora(model: str, request: Request) -> dict[str, Any]:
        """The answer comes when the file has been read and fits the model; then requests may name it."""
        _check_admin(request)
        new = parse_new_lora(await read_json(request, max_body_bytes))
        find_model(model)
        return _describe(await backend.add_lora(model, new.name, new.path))

    @api.delete("/v1/models/{model:path}/loras/{name}")
    async def remove_lora(model: str, name: str, request: Request) -> dict[str, Any]:
        """Requests that have been accepted keep theirs."""
        _check_admin(request)
        require_lora(find_model(model), name)
        await backend.remove_lora(model, name)
        return {"id": name, "object": "lora.deleted", "deleted": True}


def _describe(lora: LoraFile) -> dict[str, Any]:
    """Paths of the service's machines are nobody's business."""
    return {"id": lora.name, "object": "lora", "model": lora.model, "sha256": lora.digest or None}


def _check_admin(request: Request) -> None:
    """Raises `AdminDisabledError`, and `UnauthorizedError` without the right token."""
    expected = os.environ.get(ADMIN_TOKEN, "")
    if not expected:
        raise AdminDisabledError(f"LoRAs cannot be changed: the service has no {ADMIN_TOKEN} in its environment")
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), expected.encode()):
        raise UnauthorizedError("send the administrator's token, as Authorization: Bearer TOKEN")
