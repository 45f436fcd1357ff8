"""The field of a request that holds a picture to start from: what clients send in it, and the PNG that workers get."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.http_body import SentFile
from deployments.models import ServedModel
from tridentserve.errors import InvalidRequestError
from tridentserve.source_image import normalised

_HOW = "send the picture itself: a file in a multipart form, or base64 or a data URL as a text"
_DATA_URL = "data:"
_BASE64 = ";base64"
T = TypeVar("T")


def _sent(value: Any) -> bytes | str:
    """The file, or the base64 of it, which is not decoded yet."""
    match value:
        case bytes() | bytearray() | memoryview():
            return bytes(value)
        case [one]:
            value = one
        case [_, *_]:
            raise PydanticCustomError("picture", "several pictures are not supported by this model, give one")
    match value:
        case {"image_url": address}:
            value = address
        case {"file_id": _}:
            raise PydanticCustomError("picture", "no files are stored to name by an id; {how}", {"how": _HOW})
    match value:
        case SentFile():
            return value.content
        case bytes():
            return value
        case str() if value.startswith(_DATA_URL):
            return _payload(value)
        case str() if ":" in value:  # no base64, but an address
            raise PydanticCustomError("picture", "nothing is fetched from addresses; {how}", {"how": _HOW})
        case str():
            return value
    raise PydanticCustomError("picture", "must be a picture; {how}", {"how": _HOW})


def _payload(data_url: str) -> str:
    head, comma, payload = data_url.partition(",")
    if not comma or not head.endswith(_BASE64):
        raise PydanticCustomError("picture", "a data URL must hold base64, as in data:image/png;base64,...")
    return payload


# What `_sent` gives; files and texts are the same for clients.
SourceField = Annotated[
    bytes | str,
    BeforeValidator(_sent),
    WithJsonSchema({"type": "string", "format": "binary", "description": "a PNG, JPEG or WebP file, or base64 of it"}),
]


def source_png(sent: bytes | str, model: ServedModel, param: str) -> tuple[bytes, int, int]:
    """The picture as workers take it (see `normalised`), its width and its height. May take a second: see `decoded`.

    Raises `InvalidRequestError`, which names the field `param`, for what is no picture or beyond the model's limits."""
    limits = model.limits
    content = sent if isinstance(sent, bytes) else _from_base64(sent, limits.max_image_bytes, param)
    if len(content) > limits.max_image_bytes:
        raise _too_large(limits.max_image_bytes, param)
    return normalised(content, limits.max_image_pixels, param)


def _from_base64(text: str, max_bytes: int, param: str) -> bytes:
    if len(text) > base64_chars(max_bytes) * 2:  # half of it may be line breaks
        raise _too_large(max_bytes, param)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError(f"{param}: is not valid base64; {_HOW}", param) from None


def _too_large(max_bytes: int, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: has more than {max_bytes} bytes, the most that this model takes", param)


def base64_chars(num_bytes: int) -> int:
    return -(-num_bytes // 3) * 4


def body_bytes(max_bytes: int, models: Mapping[str, ServedModel]) -> int:
    """How long a body may be that has `max_bytes` beside the largest picture that any of the models takes."""
    largest = max((model.limits.max_image_bytes for model in models.values() if model.takes_image), default=0)
    return max_bytes + base64_chars(largest)


# Decoding takes some hundred MB for the largest pictures: so many at a time, beside the event loop.
_DECODERS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="source-picture")


async def decoded(request: Callable[[], T], picture: bytes | str | None) -> T:
    """What `request` returns or raises; in a thread of its own when it has a `picture` to decode."""
    if picture is None:
        return request()
    return await asyncio.get_running_loop().run_in_executor(_DECODERS, request)
