"""What a service answers to one image request: the picture, which is checked, and the facts about its stages."""

from __future__ import annotations

import base64
import binascii
import io
import json
from typing import Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class StageSpan(BaseModel):
    """One stage of a request as it ran: on which workers (rank order), from when to when (unix seconds).

    `steps` is the number of denoising steps, None outside DIFFUSE.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    stage: str
    workers: tuple[str, ...] = Field(min_length=1)
    degree: int = Field(ge=1)
    start_s: float
    end_s: float
    steps: int | None = None


class AnswerFacts(BaseModel):
    """The fields of an answer beside the picture; a service that is not ours may send none of them."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    stage_durations: dict[str, float] = {}
    timeline: tuple[StageSpan, ...] = ()
    slo_s: float | None = None
    slo_met: bool | None = None
    queue_s: float | None = None
    peak_memory_mb: float | None = None


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
