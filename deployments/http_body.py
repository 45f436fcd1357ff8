"""Reads bodies under a size limit, as JSON or as a form, and watches for clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from tridentserve.errors import InvalidRequestError

MAX_BODY_BYTES = 1024 * 1024
JSON = "application/json"
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
_MAX_FILES = 4
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file of a multipart form. No text: fields that hold a text do not take it."""

    content: bytes = field(repr=False)


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
    return _as_json(await _read(request, max_bytes))


async def read_fields(request: Request, max_bytes: int = MAX_BODY_BYTES) -> tuple[Any, bool]:
    """The body as a JSON value; or the fields of a form, urlencoded or multipart, as texts or a `SentFile`, but for
    `extra_body`, which is JSON there. True with a form: its numbers are texts.

    Several files of one field, or of one called `name[]`, are the list `name`. Raises as `read_json` does, and
    `InvalidRequestError` for a form that is broken or names a field twice."""
    if _check_content_type(request, (JSON, *FORMS)) == JSON:
        return await read_json(request, max_bytes), False
    body = await _read(request, max_bytes)

    async def again() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        async with Request(request.scope, again).form(max_files=_MAX_FILES, max_part_size=max_bytes) as form:
            return await _fields_of(form), True
    except (HTTPException, MultiPartException):
        raise InvalidRequestError("the body is not a valid form, or has too many fields") from None


async def _fields_of(form: FormData) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    files: dict[str, list[SentFile]] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            files.setdefault(name.removesuffix("[]"), []).append(SentFile(await value.read()))
        elif name in fields:
            raise InvalidRequestError("a field of the form is given twice")
        else:
            fields[name] = _as_json(value.encode()) if name == "extra_body" else value
    if fields.keys() & files.keys():
        raise InvalidRequestError("a field of the form is given twice")
    return fields | {name: found[0] if len(found) == 1 else found for name, found in files.items()}


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


def _as_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise InvalidRequestError("the body is not valid JSON in UTF-8 (NaN and Infinity are not JSON)") from None


def _check_content_type(request: Request, accepted: tuple[str, ...]) -> str:
    """The type of the body, which is one of those accepted."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise HTTPException(415, "compressed bodies are not accepted; send it without Content-Encoding")
    kind, *parameters = (part.strip().lower() for part in request.headers.get("content-type", "").split(";"))
    charsets = {part.removeprefix("charset=").strip('"') for part in parameters if part.startswith("charset=")}
    if kind not in accepted or not charsets <= {"utf-8", "utf8"}:
        types = " or ".join(accepted)
        raise HTTPException(415, f"the body must be JSON in UTF-8; send it with Content-Type: {types}")
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
