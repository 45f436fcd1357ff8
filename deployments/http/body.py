"""Reads bodies under a size limit, as JSON or as a form, and watches for clients that leave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from deployments.http.forms import MULTIPART, URLENCODED, form_fields
from tridentserve.errors import InvalidRequestError

MAX_BODY_BYTES = 1024 * 1024
JSON = "application/json"
FORMS = (URLENCODED, MULTIPART)
# Of a body that is longer than others may be, as it holds a picture. A small value takes a hundred times as long to
# parse as the same bytes of a long text, and the event loop waits for it; an escape some ten times. (Some clients write
# base64 with them, one in forty characters or so.)
_MAX_VALUES = 10_000
_BEGIN_VALUES = (b",", b"[", b"{")
_BYTES_PER_ESCAPE = 16
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SentFields:
    """What a body holds. `is_form`: numbers are texts. `arrived_s`: when it was there, by the monotonic clock."""

    values: Any = field(repr=False)
    is_form: bool
    arrived_s: float


def openapi_body(fields: type[BaseModel], *encodings: str) -> dict[str, Any]:
    """The part of the OpenAPI document that tells of a body."""
    schema = {"schema": fields.model_json_schema()}
    return {"requestBody": {"required": True, "content": dict.fromkeys(encodings, schema)}}


async def read_json(request: Request, max_bytes: int = MAX_BODY_BYTES) -> Any:
    """The body as a JSON value.

    Raises HTTPException 413 (as soon as more than `max_bytes` are announced or have come) and 415 (another content
    type, or a compressed body), `InvalidRequestError` when it is not JSON, `ClientDisconnect`.
    """
    _check_content_type(request, (JSON,))
    return _as_json(await _read(request, max_bytes), max_bytes)


async def read_fields(request: Request, max_bytes: int = MAX_BODY_BYTES, max_picture_bytes: int = 0) -> SentFields:
    """The body as a JSON value; or the fields of a form, urlencoded or multipart, as `form_fields` tells them, but for
    `extra_body`, which is JSON there. It may have `max_bytes`, and so many more for a picture unless it is urlencoded.

    Raises as `read_json` and `form_fields` do, and HTTPException 413 for a long body of many small values."""
    kind = _check_content_type(request, (JSON, *FORMS))
    body = await _read(request, max_bytes if kind == URLENCODED else max_bytes + max_picture_bytes)
    arrived_s = time.monotonic()
    if kind == JSON:
        return SentFields(_as_json(body, max_bytes), False, arrived_s)
    fields = await form_fields(body, request.headers["content-type"])
    if isinstance(extra := fields.get("extra_body"), str):
        fields["extra_body"] = _as_json(extra.encode(), max_bytes)
    return SentFields(fields, True, arrived_s)


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > max_bytes:
            _too_large(max_bytes)
        body += chunk
    return bytes(body)


def _as_json(body: bytes, max_bytes: int) -> Any:
    """`max_bytes`: beyond which the text must be, but for few values, one long text."""
    if len(body) > max_bytes and (
        sum(map(body.count, _BEGIN_VALUES)) > _MAX_VALUES or body.count(b"\\") > len(body) // _BYTES_PER_ESCAPE
    ):
        raise HTTPException(413, f"JSON of more than {max_bytes} bytes may hold a picture, and few values beside it")
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise InvalidRequestError("the body is not valid JSON in UTF-8 (NaN and Infinity are not JSON)") from None


def _check_content_type(request: Request, accepted: tuple[str, ...]) -> str:
    """The type of the body, which is one of those accepted."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise HTTPException(415, "compressed bodies are not accepted; send it without Content-Encoding")
    kind, *parameters = (part.strip().lower() for part in request.headers.get("content-type", "").split(";"))
    if kind not in accepted:
        hint = "; a picture is a file of a multipart form, or base64 in JSON" if MULTIPART in accepted else ""
        raise HTTPException(415, f"Content-Type: must be {' or '.join(accepted)}{hint}")
    charsets = {part.removeprefix("charset=").strip('"') for part in parameters if part.startswith("charset=")}
    if not charsets <= {"utf-8", "utf8"}:
        raise HTTPException(415, "Content-Type: names another charset than UTF-8; send the body in UTF-8")
    return kind


def _too_large(max_bytes: int) -> NoReturn:
    # The rest of the body is still on its way: the connection is of no further use.
    raise HTTPException(413, f"the body has more than {max_bytes} bytes", {"Connection": "close"})


def _no_constant(_: str) -> NoReturn:
    raise ValueError


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled, and has ended, when the client leaves or when this call is cancelled.

    A server tells an application that its client has left by a message only (uvicorn), or by cancelling it too
    (Ray Serve). Raises `ClientDisconnect`.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
