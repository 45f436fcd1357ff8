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

from deployments.http.forms import MULTIPART, URLENCODED, parse_form
from tridentserve.byte_sizes import MIB
from tridentserve.errors import InvalidRequestError

MAX_BODY_BYTES = MIB
JSON = "application/json"
FORMS = (URLENCODED, MULTIPART)
# Bounds on a long body, which holds an image. Parsing small values takes a hundred times as long as parsing the same
# bytes of a long text, escapes some ten times as long, and the event loop waits for it. (Some clients write base64 with
# escapes, about one in forty characters.)
_MAX_VALUES = 10_000
_BEGIN_VALUES = (b",", b"[", b"{")
_BYTES_PER_ESCAPE = 16
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BodyFields:
    """The content of a body."""

    values: Any = field(repr=False)
    """A JSON value, or the fields of a form."""
    is_form: bool
    """True for a form, whose numbers are texts."""
    arrived_s: float
    """Seconds of the monotonic clock at which the whole body had arrived."""


def describe_body(fields: type[BaseModel], *encodings: str) -> dict[str, Any]:
    """The part of the OpenAPI document about a body in one of these encodings."""
    schema = {"schema": make_schema(fields)}
    return {"requestBody": {"required": True, "content": dict.fromkeys(encodings, schema)}}


def make_schema(fields: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of these fields. It refers to nothing, so that it can stand anywhere in a document."""
    schema = fields.model_json_schema()
    definitions = schema.pop("$defs", {})

    def put_in(value: Any) -> Any:
        if isinstance(value, list):
            return [put_in(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return put_in(definitions[value["$ref"].rpartition("/")[2]])
        return {name: put_in(each) for name, each in value.items()}

    made: dict[str, Any] = put_in(schema)
    return made


async def read_json(request: Request, max_bytes: int = MAX_BODY_BYTES) -> Any:
    """The body as a JSON value.

    Raises HTTPException 413 (as soon as more than `max_bytes` are announced or have come) and 415 (another content
    type, or a compressed body), `InvalidRequestError` when it is not JSON, `ClientDisconnect`.
    """
    _check_content_type(request, (JSON,))
    return _parse_json(await _read_body(request, max_bytes), max_bytes)


async def read_fields(request: Request, max_bytes: int = MAX_BODY_BYTES, max_image_bytes: int = 0) -> BodyFields:
    """The body as a JSON value, or the fields of a form (urlencoded or multipart) as `parse_form` gives them; the field
    `extra_body` of a form is parsed as JSON. The body has at most `max_bytes`, and `max_image_bytes` more for an image
    unless it is urlencoded.

    Raises as `read_json` and `parse_form` do, and HTTPException 413 for a long body of many small values."""
    kind = _check_content_type(request, (JSON, *FORMS))
    body = await _read_body(request, max_bytes if kind == URLENCODED else max_bytes + max_image_bytes)
    arrived_s = time.monotonic()
    if kind == JSON:
        return BodyFields(_parse_json(body, max_bytes), False, arrived_s)
    fields = await parse_form(body, request.headers["content-type"])
    if isinstance(extra := fields.get("extra_body"), str):
        fields["extra_body"] = _parse_json(extra.encode(), max_bytes)
    return BodyFields(fields, True, arrived_s)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        _refuse_large_body(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > max_bytes:
            _refuse_large_body(max_bytes)
        body += chunk
    return bytes(body)


def _parse_json(body: bytes, max_bytes: int) -> Any:
    """Text of more than `max_bytes` must hold one long text and few other values."""
    if len(body) > max_bytes and (
        sum(map(body.count, _BEGIN_VALUES)) > _MAX_VALUES or body.count(b"\\") > len(body) // _BYTES_PER_ESCAPE
    ):
        raise HTTPException(413, f"JSON of more than {max_bytes} bytes may hold an image and few other values")
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise InvalidRequestError("the body is not valid JSON in UTF-8 (NaN and Infinity are not JSON)") from None


def _check_content_type(request: Request, accepted: tuple[str, ...]) -> str:
    """The content type of the body, which is one of those accepted. Raises HTTPException 415."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise HTTPException(415, "compressed bodies are not accepted; send it without Content-Encoding")
    kind, *parameters = (part.strip().lower() for part in request.headers.get("content-type", "").split(";"))
    if kind not in accepted:
        hint = "; an image is a file of a multipart form, or base64 in JSON" if MULTIPART in accepted else ""
        raise HTTPException(415, f"Content-Type: must be {' or '.join(accepted)}{hint}")
    charsets = {part.removeprefix("charset=").strip('"') for part in parameters if part.startswith("charset=")}
    if not charsets <= {"utf-8", "utf8"}:
        raise HTTPException(415, "Content-Type: names another charset than UTF-8; send the body in UTF-8")
    return kind


def _refuse_large_body(max_bytes: int) -> NoReturn:
    # The rest of the body is still on its way: the connection is of no further use.
    raise HTTPException(413, f"the body has more than {max_bytes} bytes", {"Connection": "close"})


def _refuse_constant(_: str) -> NoReturn:
    raise ValueError


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and has ended, when the client leaves or this call is cancelled.

    A server reports that a client has left by a message only (uvicorn), or also by cancelling the application
    (Ray Serve). Raises `ClientDisconnect`.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
