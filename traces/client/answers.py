"""The answer of a service to one request: the image or video, which is checked, and the facts about its stages."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Mapping
from typing import Any

from PIL import Image
from pydantic import ValidationError

from traces.results import AnswerFacts

# The header of an answer that is a video, which has no other place for the facts.
FACTS_HEADER = "x-request-facts"


def read_image(body: bytes, width: int, height: int) -> AnswerFacts:
    """Checks the answer of `POST /v1/images/generations` (response_format b64_json) and returns its facts.

    Raises `ValueError`, in one line, unless it holds one image of exactly this size that decodes to its last pixel.
    """
    try:
        answer: Any = json.loads(body)
        encoded: str = answer["data"][0]["b64_json"]
        image = base64.b64decode(encoded, validate=True)
    except (ValueError, LookupError, TypeError, RecursionError, binascii.Error):
        raise ValueError("the answer holds no data[0].b64_json") from None
    _check_image(image, width, height)
    return _read_facts(answer)


def read_video(body: bytes, headers: Mapping[str, str], width: int, height: int, num_frames: int) -> AnswerFacts:
    """Checks the answer of `POST /v1/videos/sync` and returns its facts, which are JSON in the header `FACTS_HEADER`;
    a service without this header has none.

    Raises `ValueError`, in one line, unless it is a video of exactly this size and length that decodes to its end.
    """
    _check_video(body, width, height, num_frames)
    try:
        facts: Any = json.loads(headers.get(FACTS_HEADER, "{}"))
        return _read_facts(facts)
    except (AttributeError, RecursionError, json.JSONDecodeError):
        raise ValueError(f"the answer's header {FACTS_HEADER} is no JSON object") from None


_FIELDS = tuple(AnswerFacts.model_fields)


def _read_facts(answer: Any) -> AnswerFacts:
    try:
        return AnswerFacts.model_validate({name: answer.get(name) for name in _FIELDS if answer.get(name) is not None})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"the answer's {place} is malformed: {first['msg']}") from None


def _check_video(content: bytes, width: int, height: int, num_frames: int) -> None:
    import av  # a tenth of a second, which traces of images need not wait for

    try:
        with av.open(io.BytesIO(content), "r") as container:
            sizes = [(frame.width, frame.height) for frame in container.decode(video=0)]
    except (av.FFmpegError, ValueError, LookupError) as error:
        raise ValueError(f"the video cannot be read: {type(error).__name__}") from None
    if len(sizes) != num_frames:
        raise ValueError(f"the video has {len(sizes)} frames where {num_frames} were asked")
    if wrong := set(sizes) - {(width, height)}:
        shown = "{}x{}".format(*wrong.pop())
        raise ValueError(f"the video is {shown} where {width}x{height} was asked")


def _check_image(encoded: bytes, width: int, height: int) -> None:
    try:
        image = Image.open(io.BytesIO(encoded), formats=("PNG", "JPEG", "WEBP"))
    except Exception as error:  # Pillow's decoders raise whatever broken bytes lead them to
        raise ValueError(f"the image cannot be read: {type(error).__name__}") from None
    with image:
        if image.size != (width, height):
            raise ValueError(f"the image is {image.width}x{image.height} where {width}x{height} was asked")
        try:
            image.load()
        except Exception as error:
            raise ValueError(f"the image is damaged: {error}") from None
