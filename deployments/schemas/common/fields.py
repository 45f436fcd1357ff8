"""Values of fields as they arrive in bodies, before any schema looks at them."""

from __future__ import annotations

from dataclasses import dataclass, field

_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file of a multipart form. It is no text, so fields that hold a text refuse it."""

    content: bytes = field(repr=False)


def show_name(name: object) -> str:
    """A field's name as messages show it: short and ASCII. A client chose the name, so it may hold anything."""
    shown = str(name)[: _MAX_NAME_CHARS + 1].encode("ascii", "backslashreplace").decode("ascii")
    return shown if len(shown) <= _MAX_NAME_CHARS else shown[:_MAX_NAME_CHARS] + "..."
