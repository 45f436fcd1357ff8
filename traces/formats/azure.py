"""Azure LLM inference traces 2023 (CC-BY-4.0): a date per request, and token counts, of no use for images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from traces.formats.text import list_csv_fields, make_line_error, parse_number, parse_unix_seconds
from traces.workloads.arrivals import Arrival
from tridentserve.errors import TraceError

NAME = "Azure LLM 2023"
_TIME, *_COUNTS = _COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
FIRST_ROW = ",".join(_COLUMNS)


def recognises(cells: Sequence[str]) -> bool:
    """True when this is the first row of such a file."""
    return {cell.strip() for cell in cells} >= set(_COLUMNS)


def read(text: str, path: str | Path, seed: int = 0) -> list[Arrival]:
    """The arrivals, ascending, from 0. Nothing is drawn, so `seed` is not used. `TraceError` with the line number."""
    times_s: list[float] = []
    for line, row in list_csv_fields(text, path):
        try:
            for name in _COUNTS:
                parse_number(name, row[name])
            times_s.append(parse_unix_seconds(_TIME, row[_TIME]))
        except TraceError as error:
            raise make_line_error(path, line, str(error)) from None
    times_s.sort()
    return [Arrival(time_s - times_s[0]) for time_s in times_s]
