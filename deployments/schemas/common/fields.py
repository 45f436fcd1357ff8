"""Values of fields as they arrive in bodies, before any schema looks at them."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file of a multipart form. It is no text, so fields that hold a text refuse it."""

    content: bytes = field(repr=False)


def read_json_text(value: Any) -> Any:
    """The object or the list that a text holds as JSON, which is how forms send them; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def show_name(name: object) -> str:
    """A field's name as messages show it: short and ASCII. A client chose the name, so it may hold anything."""
    shown = str(name)[: _MAX_NAME_CHARS + 1].encode("ascii", "backslashreplace").decode("ascii")
    return shown if len(shown) <= _MAX_NAME_CHARS else shown[:_MAX_NAME_CHARS] + "..."
