"""Errors in OpenAI's form: {"message", "type", "param", "code"}, which HTTP answers hold under the key "error".

Inside the service an error is an exception or a code with a message; only what leaves the service has this form.
"""

from __future__ import annotations

from typing import Any

from tridentserve.errors import TridentServeError, http_status_of

_RATE_LIMIT_STATUS = 429


def describe_problem(message: str, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """An error that has an HTTP status; `param` names the field of the request that is at fault."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == _RATE_LIMIT_STATUS:
        kind = "rate_limit_error"
    return {"message": message, "type": kind, "param": param, "code": code}


def describe_error(error: TridentServeError) -> dict[str, Any]:
    """An exception of the service; that of a request which would be late names the predicted seconds in addition."""
    described = describe_problem(str(error), error.http_status, error.code, getattr(error, "param", None))
    predicted_s = getattr(error, "predicted_s", None)
    return described if predicted_s is None else {**described, "predicted_s": predicted_s}


def describe_failure(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """The end of a request that failed with this code, which may be unknown here."""
    return describe_problem(message, http_status_of(code), code, param)


def describe_defect() -> dict[str, Any]:
    """A defect of the service. The message says nothing about it, because only the log may."""
    return describe_problem("internal error; the service's log has the details", 500, TridentServeError.code)
