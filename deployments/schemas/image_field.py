"""The field of a request that holds a picture to start from: what clients send in it, and the PNG that workers get."""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.http.forms import SentFile
from deployments.models.served import ServedModel
from deployments.schemas.image_limits import DecodingThreads
from tridentserve.errors import InvalidRequestError
from tridentserve.models.input_image import made_smaller, png_of, read_picture
from tridentserve.requests import GenerationInputs, RequestSpec, Shape

_HOW = "send the picture itself: a file in a multipart form, or base64 or a data URL as a text"
_DATA_URL = "data:"
_BASE64 = ";base64"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}:")
_LINE_BREAKS = b" \t\n\r\f\v"


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
        case str() if _ADDRESS.match(value):
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


def source_png(
    sent: bytes | str, model: ServedModel, param: str, shape_of: Callable[[int, int], Shape]
) -> tuple[bytes, Shape]:
    """The picture as workers take it, a PNG file, and the shape of what is made of it, which `shape_of` tells by the
    picture's width and height. It is made as small as the model's family allows. May take a second: see `decoded`.

    Raises `InvalidRequestError`, which names the field `param`, for what is no picture or beyond the model's limits;
    and what `shape_of` raises."""
    limits = model.limits
    content = sent if isinstance(sent, bytes) else _from_base64(sent, limits.max_image_bytes, param)
    if len(content) > limits.max_image_bytes:
        raise _too_large(limits.max_image_bytes, param)
    picture = read_picture(content, limits.max_image_pixels, param)
    shape = shape_of(picture.width, picture.height)
    return png_of(made_smaller(picture, shape, model.family.image_fit)), shape


def _from_base64(text: str, max_bytes: int, param: str) -> bytes:
    if len(text) > base64_chars(max_bytes) * 2:  # half of it may be line breaks
        raise _too_large(max_bytes, param)
    try:
        return base64.b64decode(text.encode("ascii").translate(None, _LINE_BREAKS), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError(f"{param}: is not valid base64; {_HOW}", param) from None


def _too_large(max_bytes: int, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: has more than {max_bytes} bytes, the most that this model takes", param)


def base64_chars(num_bytes: int) -> int:
    return -(-num_bytes // 3) * 4


def picture_bytes(models: Mapping[str, ServedModel]) -> int:
    """How much of a body the largest picture takes, as base64, that any of the models starts from."""
    largest = max((model.limits.max_image_bytes for model in models.values() if model.takes_image), default=0)
    return base64_chars(largest)


_THREADS = DecodingThreads()


async def decoded(
    request: Callable[[], tuple[RequestSpec, GenerationInputs]], picture: bytes | str | None, arrived_s: float
) -> tuple[RequestSpec, GenerationInputs]:
    """What `request` returns or raises; in a thread of its own when it has a `picture` to decode, then with how long
    it is since `arrived_s` (of the monotonic clock). Raises `OverloadedError` when too many pictures wait already."""
    if picture is None:
        return request()
    spec, inputs = await _THREADS.run(request)
    return replace(spec, waited_s=time.monotonic() - arrived_s), inputs
