"""Errors as HTTP answers. Every body has OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.openai_errors import describe_defect, describe_error, describe_problem
from tridentserve.errors import DeadlineMissedError, InvalidRequestError, RequestCancelledError, TridentServeError

CLIENT_CLOSED_REQUEST = RequestCancelledError.http_status
RETRY_AFTER_S = 1
_RETRY_STATUSES = (429, 503)
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "unsupported_media_type"}
_NO_ROUTE = "there is no such route; GET / lists them all"

logger = logging.getLogger(__name__)


class ErrorBoundary:
    """ASGI middleware: an exception that no handler knows becomes a plain 500, and its traceback goes to the log.

    Starlette's handler of last resort raises the exception again after its answer, which Ray Serve takes for a failed
    call.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception:
            if started or scope["type"] != "http":
                raise
            logger.exception("request failed")
            await _respond(500, describe_defect())(scope, receive, send)


def install_error_handlers(api: FastAPI) -> None:
    """Answer all errors of `api`, its 404 and 405 included, in OpenAI's form and without a value of the request."""
    api.add_exception_handler(TridentServeError, _handle_own_error)
    api.add_exception_handler(HTTPException, _handle_http_error)
    api.add_exception_handler(RequestValidationError, _handle_validation_error)
    api.add_exception_handler(ClientDisconnect, _handle_disconnect)
    api.add_middleware(ErrorBoundary)


def _respond(status: int, error: dict[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    retry = {"Retry-After": str(RETRY_AFTER_S)} if status in _RETRY_STATUSES else {}
    return JSONResponse({"error": error}, status_code=status, headers={**(headers or {}), **retry})


async def _handle_own_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, TridentServeError):
        raise error
    if isinstance(error, DeadlineMissedError):
        # A client that wants a refusal hears it at once. OpenAI's send the same request again unless they are told.
        return JSONResponse({"error": describe_error(error)}, error.http_status, {"X-Should-Retry": "false"})
    return _respond(error.http_status, describe_error(error))


async def _handle_http_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    code = _HTTP_CODES.get(error.status_code, "http_error")
    message = _NO_ROUTE if error.detail == HTTPStatus.NOT_FOUND.phrase else error.detail
    return _respond(error.status_code, describe_problem(message, error.status_code, code), error.headers)


async def _handle_validation_error(_: Request, error: Exception) -> Response:
    """Parameters of the address are wrong. FastAPI's own answer would repeat their values."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    param, problem = str(first["loc"][-1]), str(first["msg"])
    return _respond(422, describe_problem(f"{param}: {problem}", 422, InvalidRequestError.code, param))


async def _handle_disconnect(_: Request, __: Exception) -> Response:
    """Nobody reads this answer; its status shows in access logs."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
