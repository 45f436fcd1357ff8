"""Forms as fields: urlencoded ones, and multipart ones with their files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from deployments.schemas.common.fields import SentFile, show_name
from tridentserve.errors import InvalidRequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MULTIPART = "multipart/form-data"
URLENCODED = "application/x-www-form-urlencoded"
# There are some thirty fields, and edits of OpenAI's clients may have sixteen images.
_MAX_PARTS = 64
# The piece that is parsed before the event loop serves others: some milliseconds for the slowest bytes.
_CHUNK_BYTES = 16 * 1024


async def parse_form(body: bytes, content_type: str) -> dict[str, Any]:
    """The fields of a form, each a text or a `SentFile`. A field of several files, or one that is sent as `name[]`
    several times, is a list. The event loop serves others in between.

    Raises `InvalidRequestError` for a form that is broken or gives a field twice."""
    if content_type.strip().lower().startswith(MULTIPART):
        return _gather_fields(await _parse_multipart(body, content_type))
    return _gather_fields(await asyncio.to_thread(_parse_urlencoded, body))


def _parse_urlencoded(body: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARTS)
    except UnicodeError:
        raise _make_form_error("its texts are not UTF-8") from None
    except ValueError:
        raise _make_form_error(f"it has more than {_MAX_PARTS} fields") from None


def _gather_fields(sent: Sequence[tuple[str, str | SentFile]] | Sequence[tuple[str, str]]) -> dict[str, Any]:
    values: dict[str, list[str | SentFile]] = {}
    texts_once: set[str] = set()
    for name, value in sent:
        key = name.removesuffix("[]")
        values.setdefault(key, []).append(value)
        if key == name and isinstance(value, str):
            texts_once.add(key)
    for key in texts_once:
        if len(values[key]) > 1:
            raise InvalidRequestError(f"{show_name(key)}: is given twice in the form, give it once", show_name(key))
    return {key: found[0] if len(found) == 1 else found for key, found in values.items()}


@dataclass(slots=True)
class _FormPart:
    disposition: bytes = b""
    content: bytearray = field(default_factory=bytearray)

    def read(self) -> tuple[str, str | SentFile]:
        """The name and the value. A part with a file name is a file; so is a part that is no text, because some clients
        leave the file name out."""
        _, options = parse_options_header(self.disposition)
        if (name := options.get(b"name")) is None:
            raise _make_form_error("a part of it has no name (`Content-Disposition: form-data; name=...`)")
        try:
            value = SentFile(bytes(self.content)) if b"filename" in options else self.content.decode()
            return name.decode(), value
        except UnicodeDecodeError:
            return name.decode(errors="replace"), SentFile(bytes(self.content))


class _FormParts:
    """The callbacks of `python_multipart`, which gather the parts of a form."""

    def __init__(self) -> None:
        self.found: list[_FormPart] = []
        self.is_whole = False  # until the end of the form has come
        self._header, self._value = bytearray(), bytearray()

    def make_callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_part_data": self._add_data,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_end": self._end_form,
        }

    def _begin_part(self) -> None:
        if len(self.found) == _MAX_PARTS:
            raise _make_form_error(f"it has more than {_MAX_PARTS} fields")
        self.found.append(_FormPart())

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self.found[-1].content += data[start:end]

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self.found[-1].disposition = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _end_form(self) -> None:
        self.is_whole = True


async def _parse_multipart(body: bytes, content_type: str) -> list[tuple[str, str | SentFile]]:
    _, options = parse_options_header(content_type)
    if not (boundary := options.get(b"boundary")):
        raise _make_form_error("its Content-Type names no boundary; let the HTTP client's library write that header")
    parts = _FormParts()
    try:
        parser = MultipartParser(boundary, parts.make_callbacks())
        for start in range(0, len(body), _CHUNK_BYTES):
            parser.write(body[start : start + _CHUNK_BYTES])
            await asyncio.sleep(0)
        parser.finalize()
    except FormParserError:
        raise _make_form_error("its parts cannot be separated by the boundary that its Content-Type names") from None
    if not parts.is_whole:
        raise _make_form_error("it is cut off: its last boundary is missing")
    return [part.read() for part in parts.found]


def _make_form_error(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is not a valid form: {problem}")
