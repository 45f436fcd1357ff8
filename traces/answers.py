"""What a service answers to one image request: the picture, which is checked, and the facts about its stages."""

from __future__ import annotations

import base64
import binascii
import io
import json
from typing import Any

from PIL import Image
from pydantic import ValidationError

from traces.results import AnswerFacts


def read_answer(body: bytes, width: int, height: int) -> AnswerFacts:
    """Checks the answer of `POST /v1/images/generations` (response_format b64_json) and returns its facts.

    Raises `ValueError`, in one line, unless it holds one picture of exactly this size that decodes to its last pixel.
    """
    try:
        answer: Any = json.loads(body)
        encoded: str = answer["data"][0]["b64_json"]
        picture = base64.b64decode(encoded, validate=True)
    except (ValueError, LookupError, TypeError, RecursionError, binascii.Error):
        raise ValueError("the answer holds no data[0].b64_json") from None
    _check_picture(picture, width, height)
    try:
        return AnswerFacts.model_validate({name: answer.get(name) for name in _FIELDS if answer.get(name) is not None})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"the answer's {place} is malformed: {first['msg']}") from None


_FIELDS = tuple(AnswerFacts.model_fields)


def _check_picture(encoded: bytes, width: int, height: int) -> None:
    try:
        picture = Image.open(io.BytesIO(encoded), formats=("PNG", "JPEG", "WEBP"))
    except Exception as error:  # Pillow's decoders raise whatever broken bytes lead them to
        raise ValueError(f"the picture cannot be read: {type(error).__name__}") from None
    with picture:
        if picture.size != (width, height):
            raise ValueError(f"the picture is {picture.width}x{picture.height} where {width}x{height} was asked")
        try:
            picture.load()
        except Exception as error:
            raise ValueError(f"the picture is damaged: {error}") from None
