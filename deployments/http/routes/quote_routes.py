"""The route of quotes: when a request would be finished if it were made now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request

from deployments.backend import Backend
from deployments.http.body import JSON, describe_body, read_json
from deployments.http.python_handle import quote
from deployments.models.served import ServedModel
from deployments.schemas.quote import QuoteRequest

QUOTE_ROUTES = ("POST /v1/quotes",)
_BODY = describe_body(QuoteRequest, JSON)


def add_quote_routes(
    api: FastAPI, backend: Backend, models: Mapping[str, ServedModel], max_body_bytes: int, lenient: bool
) -> None:
    """Nothing is started, and nothing is kept free for the request. The Python handle answers the same, by its method
    `quote`."""

    @api.post("/v1/quotes", openapi_extra=_BODY)
    async def quote_requests(request: Request) -> dict[str, Any]:
        """An entry for each size, number of steps and quality that the body names. Whatever the body asks for, it is
        one call of the scheduler's process, which looks at its books once for each entry."""
        return await quote(backend, models, await read_json(request, max_body_bytes), lenient)
