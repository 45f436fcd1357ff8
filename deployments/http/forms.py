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

from tridentserve.errors import InvalidRequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MULTIPART = "multipart/form-data"
URLENCODED = "application/x-www-form-urlencoded"
# There are some thirty fields, and OpenAI's edits may have sixteen pictures.
_MAX_PARTS = 64
# What is parsed before others get their turn in the event loop: some milliseconds of the most laborious bytes.
_CHUNK_BYTES = 16 * 1024
_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file of a multipart form. No text: fields that hold a text do not take it."""

    content: bytes = field(repr=False)


def shown_name(name: object) -> str:
    """A field's name as it can be shown: short, ASCII. A client chose it, it may hold anything."""
    shown = str(name)[: _MAX_NAME_CHARS + 1].encode("ascii", "backslashreplace").decode("ascii")
    return shown if len(shown) <= _MAX_NAME_CHARS else shown[:_MAX_NAME_CHARS] + "..."


async def form_fields(body: bytes, content_type: str) -> dict[str, Any]:
    """The fields of a form, as texts or as a `SentFile`. A field of several files, or one that is sent as `name[]`
    several times, is a list. The event loop gets its turn meanwhile.

    Raises `InvalidRequestError` for a form that is broken or gives a field twice."""
    if content_type.strip().lower().startswith(MULTIPART):
        return _gathered(await _multipart(body, content_type))
    return _gathered(await asyncio.to_thread(_urlencoded, body))


def _urlencoded(body: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARTS)
    except UnicodeError:
        raise _broken("its texts are not UTF-8") from None
    except ValueError:
        raise _broken(f"it has more than {_MAX_PARTS} fields") from None


def _gathered(sent: Sequence[tuple[str, str | SentFile]] | Sequence[tuple[str, str]]) -> dict[str, Any]:
    values: dict[str, list[str | SentFile]] = {}
    texts_once: set[str] = set()
    for name, value in sent:
        key = name.removesuffix("[]")
        values.setdefault(key, []).append(value)
        if key == name and isinstance(value, str):
            texts_once.add(key)
    for key in texts_once:
        if len(values[key]) > 1:
            raise InvalidRequestError(f"{shown_name(key)}: is given twice in the form, give it once", shown_name(key))
    return {key: found[0] if len(found) == 1 else found for key, found in values.items()}


@dataclass(slots=True)
class _Part:
    disposition: bytes = b""
    content: bytearray = field(default_factory=bytearray)

    def named(self) -> tuple[str, str | SentFile]:
        """What has a file name is a file, and so is what is no text (some clients leave the name out)."""
        _, options = parse_options_header(self.disposition)
        if (name := options.get(b"name")) is None:
            raise _broken("a part of it has no name (`Content-Disposition: form-data; name=...`)")
        try:
            value = SentFile(bytes(self.content)) if b"filename" in options else self.content.decode()
            return name.decode(), value
        except UnicodeDecodeError:
            return name.decode(errors="replace"), SentFile(bytes(self.content))


class _Parts:
    """What `python_multipart` calls while it parses. `is_whole` once the end of the form has come."""

    def __init__(self) -> None:
        self.found: list[_Part] = []
        self.is_whole = False
        self._header, self._value = bytearray(), bytearray()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._data,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.found) == _MAX_PARTS:
            raise _broken(f"it has more than {_MAX_PARTS} fields")
        self.found.append(_Part())

    def _data(self, data: bytes, start: int, end: int) -> None:
        self.found[-1].content += data[start:end]

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self.found[-1].disposition = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _end(self) -> None:
        self.is_whole = True


async def _multipart(body: bytes, content_type: str) -> list[tuple[str, str | SentFile]]:
    _, options = parse_options_header(content_type)
    if not (boundary := options.get(b"boundary")):
        raise _broken("its Content-Type names no boundary; let the HTTP client's library write that header")
    parts = _Parts()
    try:
        parser = MultipartParser(boundary, parts.callbacks())
        for start in range(0, len(body), _CHUNK_BYTES):
            parser.write(body[start : start + _CHUNK_BYTES])
            await asyncio.sleep(0)
        parser.finalize()
    except FormParserError:
        raise _broken("its parts cannot be told apart by the boundary that its Content-Type names") from None
    if not parts.is_whole:
        raise _broken("it is cut off: its last boundary is missing")
    return [part.named() for part in parts.found]


def _broken(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is not a valid form: {problem}")
