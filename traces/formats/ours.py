"""Trace files: `Request(...)` lines and our CSV, distinguished by their content, not by their name."""

from __future__ import annotations

import ast
import csv
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from traces.formats.text import list_csv_cells, list_text_lines, make_line_error, read_text
from traces.requests import FIELDS, REQUIRED, Number, TraceRequest, check_names, from_fields, quote, to_fields
from tridentserve.errors import TraceError

# The API refuses bodies above 1 MiB, so a longer line could not be sent; it also bounds what the parser is given.
_MAX_LINE_CHARS = 2**20

Row = tuple[int, dict[str, object]]


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a trace in order of time (equal times keep their order); with `limit` the earliest ones.

    All of the file is checked, whatever the limit. Raises `TraceError` with the line number of the first bad row, and
    for a file that cannot be read, is in no known format or holds no request.
    """
    text = read_text(path)
    requests: list[TraceRequest] = []
    line_of_id: dict[str, int] = {}
    for line, fields in _recognise(text, path)(text, path):
        try:
            request = from_fields(fields)
        except TraceError as error:
            raise make_line_error(path, line, str(error)) from None
        if request.request_id in line_of_id:
            first = line_of_id[request.request_id]
            raise make_line_error(
                path, line, f"request_id {quote(request.request_id)} was used on line {first} already"
            )
        line_of_id[request.request_id] = line
        requests.append(request)
    if not requests:
        raise TraceError(f"{path} holds no requests")
    return sorted(requests, key=lambda request: request.timestamp_s)[:limit]


def write_trace(requests: Sequence[TraceRequest], path: str | Path, comment: str = "") -> None:
    """Writes CSV when the path ends in `.csv`, else `Request(...)` lines; `read_trace` gives the same requests back.

    `comment` (where the requests come from, say) goes ahead of them, as lines that begin with `#`.
    Raises `TraceError` for a request that could not be read back (a NaN timestamp, say) and writes nothing then.
    """
    rows = [to_fields(request) for request in requests]
    for position, row in enumerate(rows):
        try:
            from_fields(row)
        except TraceError as error:
            raise TraceError(f"request {position} cannot be written: {error}") from None
    text = _write_csv(rows) if Path(path).suffix.lower() == ".csv" else _write_lines(rows)
    # A quote would open a cell that spans lines for a CSV reader.
    head = "".join(f"# {line}\n" for line in comment.replace('"', "'").splitlines())
    Path(path).write_text(head + text, encoding="utf-8", newline="")


def _recognise(text: str, path: str | Path) -> Callable[[str, str | Path], Iterator[Row]]:
    line, first = next(list_text_lines(text), (1, ""))
    if not first:
        raise make_line_error(path, line, "the file is empty: it holds no request")
    if first.startswith("Request"):
        return _request_lines
    if "," in first and not {cell.strip().strip('"') for cell in first.split(",")}.isdisjoint(REQUIRED):
        return _read_csv_rows
    raise make_line_error(
        path,
        line,
        f"neither a Request(...) line nor the header of our CSV ({','.join(REQUIRED)}, ...): {quote(first)}; traces of "
        "others hold no sizes, scripts/make_trace.py --from draws them",
    )


def _request_lines(text: str, path: str | Path) -> Iterator[Row]:
    for line, content in list_text_lines(text):
        try:
            yield line, _parse_call(content)
        except TraceError as error:
            raise make_line_error(path, line, str(error)) from None


def _parse_call(content: str) -> dict[str, object]:
    """The keyword constants of one `Request(...)` line. Nothing of it is ever evaluated."""
    if len(content) > _MAX_LINE_CHARS:
        raise TraceError(f"longer than {_MAX_LINE_CHARS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a prompt may hold "\d", which is a warning of Python's parser
            call = ast.parse(content, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise TraceError(f"not a well-formed Request(...) line: {quote(content)}") from None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Request"):
        raise TraceError(f"not a Request(...) line: {quote(content)}")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise TraceError("Request(...) takes only name=value arguments")
    fields: dict[str, object] = {}
    for keyword in call.keywords:
        name = _parse_column(str(keyword.arg))
        if name in fields:
            raise TraceError(f"{name} is given twice")
        fields[name] = _parse_constant(name, keyword.value)
    return fields


def _parse_constant(name: str, node: ast.expr) -> object:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    raise TraceError(f"{name} must be a plain number or text, not an expression")


def _parse_column(name: str) -> str:
    """`timestamp_s`, the name that carries its unit, is taken for `timestamp`, the name in published traces."""
    return "timestamp" if name == "timestamp_s" else name


def _read_csv_rows(text: str, path: str | Path) -> Iterator[Row]:
    header: list[str] | None = None
    for line, cells in list_csv_cells(text, path):
        try:
            if header is None:
                header = _read_header(cells)
            else:
                yield line, _make_row(header, cells)
        except TraceError as error:
            raise make_line_error(path, line, str(error)) from None


def _read_header(cells: list[str]) -> list[str]:
    header = [_parse_column(cell.strip()) for cell in cells]
    if len(set(header)) != len(header):
        raise TraceError("the header names a column twice")
    check_names(dict.fromkeys(header))
    return header


def _make_row(header: list[str], cells: list[str]) -> dict[str, object]:
    if len(cells) != len(header):
        raise TraceError(f"{len(cells)} cells where the header has {len(header)}")
    return {name: _parse_cell(name, cell) for name, cell in zip(header, cells, strict=True)}


def _parse_cell(name: str, cell: str) -> object:
    """Text stays as it is; an empty cell of an optional field is None; a number is read as Python would."""
    if not isinstance(FIELDS[name], Number):
        return cell if cell or name in REQUIRED else None
    text = cell.strip()
    if not text:
        if name in REQUIRED:
            raise TraceError(f"{name} is empty")
        return None
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    raise TraceError(f"{name} must be a number, not {quote(cell)}")


def _write_lines(rows: Iterable[dict[str, object]]) -> str:
    return "".join(
        f"Request({', '.join(f'{name}={value!r}' for name, value in row.items() if value is not None)})\n"
        for row in rows
    )


def _write_csv(rows: Iterable[dict[str, object]]) -> str:
    stream = io.StringIO(newline="")
    # All text is quoted: the csv module leaves a lone carriage return bare otherwise, and it would end the row.
    writer = csv.DictWriter(stream, list(FIELDS), lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
