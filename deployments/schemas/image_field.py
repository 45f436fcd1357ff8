"""The field of a request that holds an input image: the forms in which clients send it, and the PNG for workers."""

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

from deployments.models.served import ServedModel
from deployments.schemas.fields import SentFile
from deployments.schemas.image_limits import DecodingThreads
from tridentserve.errors import InvalidRequestError
from tridentserve.models.input_image import encode_png, read_image, shrink_image
from tridentserve.requests import GenerationInputs, RequestSpec, Shape

_HOW = "send the image itself: a file in a multipart form, or base64 or a data URL as a text"
_DATA_URL = "data:"
_BASE64 = ";base64"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}:")
_LINE_BREAKS = b" \t\n\r\f\v"


def _unwrap(value: Any) -> bytes | str:
    """The file, or its base64, which is not decoded yet."""
    match value:
        case bytes() | bytearray() | memoryview():
            return bytes(value)
        case [one]:
            value = one
        case [_, *_]:
            raise PydanticCustomError("image", "several images are not supported by this model, give one")
    match value:
        case {"image_url": address}:
            value = address
        case {"file_id": _}:
            raise PydanticCustomError("image", "no files are stored to name by an id; {how}", {"how": _HOW})
    match value:
        case SentFile():
            return value.content
        case bytes():
            return value
        case str() if value.startswith(_DATA_URL):
            return _extract_base64(value)
        case str() if _ADDRESS.match(value):
            raise PydanticCustomError("image", "nothing is fetched from addresses; {how}", {"how": _HOW})
        case str():
            return value
    raise PydanticCustomError("image", "must be an image; {how}", {"how": _HOW})


def _extract_base64(data_url: str) -> str:
    head, comma, payload = data_url.partition(",")
    if not comma or not head.endswith(_BASE64):
        raise PydanticCustomError("image", "a data URL must hold base64, as in data:image/png;base64,...")
    return payload


# The result of `_unwrap`. Clients need not know whether the field holds a file or a text.
ImageField = Annotated[
    bytes | str,
    BeforeValidator(_unwrap),
    WithJsonSchema(
        {"type": "string", "format": "binary", "description": "The input image: a PNG, JPEG or WebP file, or base64."}
    ),
]


def encode_input_image(
    sent: bytes | str, model: ServedModel, param: str, choose_shape: Callable[[int, int], Shape]
) -> tuple[bytes, Shape]:
    """The input image as workers take it (a PNG file), and the shape of the output, which `choose_shape` gives for the
    width and the height of the image. The PNG is as small as the model's family allows. This may take a second.

    Raises `InvalidRequestError`, which names the field `param`, for a value that is no image or is beyond the model's
    limits, and what `choose_shape` raises."""
    limits = model.limits
    content = sent if isinstance(sent, bytes) else _decode_base64(sent, limits.max_image_bytes, param)
    if len(content) > limits.max_image_bytes:
        raise _make_size_error(limits.max_image_bytes, param)
    image = read_image(content, limits.max_image_pixels, param)
    shape = choose_shape(image.width, image.height)
    return encode_png(shrink_image(image, shape, model.family.image_fit)), shape


def _decode_base64(text: str, max_bytes: int, param: str) -> bytes:
    if len(text) > count_base64_chars(max_bytes) * 2:  # half of the text may be line breaks
        raise _make_size_error(max_bytes, param)
    try:
        return base64.b64decode(text.encode("ascii").translate(None, _LINE_BREAKS), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError(f"{param}: is not valid base64; {_HOW}", param) from None


def _make_size_error(max_bytes: int, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: has more than {max_bytes} bytes, the most that this model takes", param)


def count_base64_chars(num_bytes: int) -> int:
    """The length of base64 of this many bytes."""
    return -(-num_bytes // 3) * 4


def count_image_chars(models: Mapping[str, ServedModel]) -> int:
    """The length of the largest input image, as base64, that any of the models takes; 0 if none takes images."""
    largest = max((model.limits.max_image_bytes for model in models.values() if model.takes_image), default=0)
    return count_base64_chars(largest)


_THREADS = DecodingThreads()


async def build_beside_loop(
    build: Callable[[], tuple[RequestSpec, GenerationInputs]], image: bytes | str | None, arrived_s: float
) -> tuple[RequestSpec, GenerationInputs]:
    """The result of `build`, or what it raises. With an `image` to decode, `build` runs in a thread, and the request
    counts the seconds since `arrived_s` (of the monotonic clock). Raises `OverloadedError` when too many images wait
    already."""
    if image is None:
        return build()
    spec, inputs = await _THREADS.run(build)
    return replace(spec, waited_s=time.monotonic() - arrived_s), inputs
