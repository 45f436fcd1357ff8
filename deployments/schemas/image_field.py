"""The field of a request that holds input images: the forms in which clients send them, and the PNGs for workers."""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.models.served import ServedModel
from deployments.schemas.common.fields import SentFile
from deployments.schemas.image_limits import DecodingThreads
from tridentserve.errors import InvalidRequestError
from tridentserve.models.input_image import check_sides, encode_png, read_image, read_mask, shrink_image
from tridentserve.requests import GenerationInputs, RequestSpec, Shape

_HOW = "send the image itself: a file in a multipart form, or base64 or a data URL as a text"
_DATA_URL = "data:"
_BASE64 = ";base64"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}:")
# What errors add where images of the request have taken a part of what it may have.
_BESIDE_OTHERS = " beside the images before it"
_LINE_BREAKS = b" \t\n\r\f\v"


def _unwrap(value: Any) -> bytes | str:
    """The file, or its base64, which is not decoded yet, also where it is the only one of a list."""
    match value:
        case [one]:
            value = one
        case [_, *_]:
            raise PydanticCustomError("image", "several images are not supported here, give one")
    return _unwrap_one(value)


def _unwrap_all(value: Any) -> tuple[bytes | str, ...]:
    """The same for each of several images, or for one that stands alone."""
    return tuple(map(_unwrap_one, value if isinstance(value, list | tuple) and value else [value]))


def _unwrap_one(value: Any) -> bytes | str:
    match value:
        case {"image_url": address}:
            value = address
        case {"file_id": _}:
            raise PydanticCustomError("image", "no files are stored to name by an id; {how}", {"how": _HOW})
    match value:
        case SentFile():
            return value.content
        case bytes() | bytearray() | memoryview():
            return bytes(value)
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
# The result of `_unwrap_all`.
ImagesField = Annotated[
    tuple[bytes | str, ...],
    BeforeValidator(_unwrap_all),
    WithJsonSchema(
        {
            "description": "The input image, or a list of several: PNG, JPEG or WebP files, or base64.",
            "anyOf": [
                {"type": "string", "format": "binary"},
                {"type": "array", "items": {"type": "string", "format": "binary"}},
            ],
        }
    ),
]


def encode_input_image(
    sent: bytes | str, model: ServedModel, param: str, choose_shape: Callable[[int, int], Shape]
) -> tuple[bytes, Shape]:
    """The input image as workers take it (a PNG file), and the shape of the output, which `choose_shape` gives for the
    width and the height of the image. The PNG is as small as the model's family allows. This may take a second.

    Raises as `encode_input_images` does."""
    encoded = encode_input_images((sent,), model, param, choose_shape)
    return encoded.files[0], encoded.shape


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """The input images of a request as workers take them."""

    files: tuple[bytes, ...] = field(repr=False)
    """PNG files, as small as the model's family allows."""
    shape: Shape
    """The shape of the output."""
    token_ratio: float
    """See `RequestSpec.token_ratio`."""
    size: tuple[int, int]
    """The width and height of the first image as it was sent."""
    left_bytes: int
    """The bytes that the files leave of those that the model takes."""


def encode_input_images(
    sent: Sequence[bytes | str], model: ServedModel, param: str, choose_shape: Callable[[int, int], Shape]
) -> EncodedImages:
    """The input images as workers take them. `choose_shape` gives the shape of the output for the width and the height
    of the first. This may take a second.

    Raises `InvalidRequestError`, which names the field `param`, or one of several images in it, for a value that is no
    image, for images that are together beyond the model's limits, and what `choose_shape` raises."""
    names = [param] if len(sent) == 1 else [f"{param}[{index}]" for index in range(len(sent))]
    left_bytes, left_pixels = model.limits.max_image_bytes, model.limits.max_image_pixels
    files, sizes, sent_sizes, shape, beside = list[bytes](), list[tuple[int, int]](), list[tuple[int, int]](), None, ""
    for value, name in zip(sent, names, strict=True):
        content = value if isinstance(value, bytes) else _decode_base64(value, left_bytes, name, beside)
        if len(content) > left_bytes:
            raise _make_size_error(left_bytes, name, beside)
        image = read_image(content, left_pixels, name, beside)
        beside = _BESIDE_OTHERS
        check_sides(model.family, image, name)
        left_bytes, left_pixels = left_bytes - len(content), left_pixels - image.width * image.height
        sent_sizes.append(image.size)
        shape = shape or choose_shape(image.width, image.height)
        image = shrink_image(image, shape, model.family)
        files.append(encode_png(image))
        sizes.append(image.size)
    if shape is None:
        raise InvalidRequestError(f"{param}: is required: {_HOW}", param)
    ratio = model.family.compute_token_ratio(shape, sizes)
    return EncodedImages(tuple(files), shape, ratio, sent_sizes[0], left_bytes)


def encode_mask(sent: bytes | str, images: EncodedImages, param: str) -> bytes:
    """The mask of the first of these images as workers take it: a grey PNG file of the image's size, white where the
    image is to be painted anew. Raises `InvalidRequestError`, which names the field `param`."""
    left_bytes = images.left_bytes
    content = sent if isinstance(sent, bytes) else _decode_base64(sent, left_bytes, param, _BESIDE_OTHERS)
    if len(content) > left_bytes:
        raise _make_size_error(left_bytes, param, _BESIDE_OTHERS)
    return encode_png(read_mask(content, images.size, param))


def _decode_base64(text: str, max_bytes: int, param: str, beside: str) -> bytes:
    if len(text) > count_base64_chars(max_bytes) * 2:  # half of the text may be line breaks
        raise _make_size_error(max_bytes, param, beside)
    try:
        return base64.b64decode(text.encode("ascii").translate(None, _LINE_BREAKS), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError(f"{param}: is not valid base64; {_HOW}", param) from None


def _make_size_error(max_bytes: int, param: str, beside: str) -> InvalidRequestError:
    message = f"{param}: has more than {max_bytes} bytes, the most that this model takes{beside}"
    return InvalidRequestError(message, param)


def count_base64_chars(num_bytes: int) -> int:
    """The length of base64 of this many bytes."""
    return -(-num_bytes // 3) * 4


def count_image_chars(models: Mapping[str, ServedModel]) -> int:
    """The length of the largest input image, as base64, that any of the models takes, or would take if it were allowed
    to, as it refuses one by its name; 0 if there is none."""
    taking = (model for model in models.values() if model.takes_image or model.family.image_start is not None)
    return count_base64_chars(max((model.limits.max_image_bytes for model in taking), default=0))


_THREADS = DecodingThreads()


async def build_beside_loop(
    build: Callable[[], tuple[RequestSpec, GenerationInputs]], has_image: bool, arrived_s: float
) -> tuple[RequestSpec, GenerationInputs]:
    """The result of `build`, or what it raises. With images to decode, `build` runs in a thread, and the request counts
    the seconds since `arrived_s` (of the monotonic clock). Raises `OverloadedError` when too many requests with images
    wait already."""
    if not has_image:
        return build()
    spec, inputs = await _THREADS.run(build)
    return replace(spec, waited_s=time.monotonic() - arrived_s), inputs
