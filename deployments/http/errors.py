"""Errors as HTTP answers, all in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tridentserve.errors import InvalidRequestError, RequestCancelledError, TridentServeError, http_status_of

CLIENT_CLOSED_REQUEST = RequestCancelledError.http_status
RETRY_AFTER_S = 1
_RETRY_STATUSES = (429, 503)
_TYPES = {429: "rate_limit_error"}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "unsupported_media_type"}

logger = logging.getLogger(__name__)


def error_body(message: str, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    family = "server_error" if status >= 500 else "invalid_request_error"
    kind = _TYPES.get(status, family)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: TridentServeError) -> dict[str, Any]:
    return error_body(str(error), error.http_status, error.code, getattr(error, "param", None))


def openai_error(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """What stands under "error" for a request that failed with this code."""
    fields: dict[str, Any] = error_body(message, http_status_of(code), code, param)["error"]
    return fields


def _answer(status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    retry = {"Retry-After": str(RETRY_AFTER_S)} if status in _RETRY_STATUSES else {}
    return JSONResponse(body, status_code=status, headers={**(headers or {}), **retry})


def internal_error() -> dict[str, Any]:
    """Says nothing of what happened: the log does."""
    return error_body("internal error; the service's log tells more", 500, TridentServeError.code)


async def _on_our_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, TridentServeError):
        raise error
    return _answer(error.http_status, body_of(error))


async def _on_http_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    code = _HTTP_CODES.get(error.status_code, "http_error")
    return _answer(error.status_code, error_body(error.detail, error.status_code, code), error.headers)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    """Of parameters in the address. FastAPI's own answer would repeat their values."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    param, problem = str(first["loc"][-1]), str(first["msg"])
    return _answer(422, error_body(f"{param}: {problem}", 422, InvalidRequestError.code, param))


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """Nobody reads it; the status shows in access logs."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


class ErrorBoundary:
    """ASGI middleware: what no handler knows becomes a plain 500, and goes to the log.

    Starlette's own handler of last resort raises again after its answer, and Ray Serve takes that for a failed call.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except Exception:
            if started or scope["type"] != "http":
                raise
            logger.exception("request failed")
            await _answer(500, internal_error())(scope, receive, send)


def install_error_handlers(api: FastAPI) -> None:
    """All errors of `api`, its 404s and 405s too, are answered in OpenAI's form, and without a value of the request."""
    api.add_exception_handler(TridentServeError, _on_our_error)
    api.add_exception_handler(HTTPException, _on_http_error)
    api.add_exception_handler(RequestValidationError, _on_validation_error)
    api.add_exception_handler(ClientDisconnect, _on_disconnect)
    api.add_middleware(ErrorBoundary)
