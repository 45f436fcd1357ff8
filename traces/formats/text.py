"""The common part of all readers of trace files: text with line numbers, and errors that name them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from traces.requests import quote
from tridentserve.errors import TraceError


def make_line_error(path: str | Path, line: int, what: str) -> TraceError:
    """The error for one line of a file."""
    return TraceError(f"{path}, line {line}: {what}")


def read_text(path: str | Path) -> str:
    """The text of a file, without a byte order mark. `TraceError` when it cannot be read or is not UTF-8."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise make_line_error(path, data.count(b"\n", 0, error.start) + 1, "not UTF-8 text") from None


def list_text_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are neither blank nor a comment, stripped, with their numbers."""
    # Not str.splitlines: it also breaks at characters such as U+2028, which a prompt may hold.
    for line, content in enumerate(text.split("\n"), start=1):
        stripped = content.strip()
        if stripped and not stripped.startswith("#"):
            yield line, stripped


def list_csv_cells(text: str, path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV that are not blank, with the number of their first line (a quoted cell may span lines).
    Comment lines ahead of the first row are left out. `TraceError` when it is not well-formed CSV."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    begun = False
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise make_line_error(path, line, f"not well-formed CSV: {error}") from None
        if cells is None:
            return
        if cells and (begun or not cells[0].startswith("#")):
            begun = True
            yield line, cells


def list_csv_fields(text: str, path: str | Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV with a header, as `{column: cell}`, both stripped. `TraceError` for a row of another length."""
    header: list[str] | None = None
    for line, cells in list_csv_cells(text, path):
        if header is None:
            header = [cell.strip() for cell in cells]
        elif len(cells) != len(header):
            raise make_line_error(path, line, f"{len(cells)} cells where the header has {len(header)}")
        else:
            yield line, {name: cell.strip() for name, cell in zip(header, cells, strict=True)}


def parse_unix_seconds(name: str, cell: str) -> float:
    """A date and time as CSVs write it, read as UTC. `TraceError`, without the place, when it is none."""
    try:
        moment = datetime.fromisoformat(cell)
    except ValueError:
        raise TraceError(f"{name} must be a date and time, not {quote(cell)}") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def parse_number(name: str, cell: str) -> float:
    """The number in a cell. `TraceError`, without the place, when it is none, negative, or not finite."""
    try:
        value = float(cell)
    except ValueError:
        raise TraceError(f"{name} must be a number, not {quote(cell)}") from None
    if not 0 <= value < float("inf"):
        raise TraceError(f"{name} must be finite and not negative, not {quote(cell)}")
    return value
