"""The columns `on_late` and `priority` of traces."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.traces.formats.sample_rows import HEADER, LINE, REQUEST, ROW, write
from traces.formats.ours import read_trace, write_trace
from tridentserve.errors import TraceError


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("on_late", "later", "on_late must be one of wait, refuse, degrade, not 'later'"),
        ("on_late", "1", "on_late must be one of wait, refuse, degrade"),
        ("priority", "1001", "priority must be at least -1000 and at most 1000, not 1001"),
        ("priority", "-1001", "priority must be at least -1000 and at most 1000, not -1001"),
        ("priority", "0.5", "priority must be a whole number, not 0.5"),
        ("priority", "high", "priority must be a number, not 'high'"),
    ],
)
def test_bad_values_of_late_requests_are_reported_with_file_and_line(
    tmp_path: Path, column: str, value: str, message: str
) -> None:
    table = write(tmp_path, f"{HEADER},{column}\n{ROW},\n{ROW.replace('0,', '1,', 1)},{value}\n")
    with pytest.raises(TraceError, match=f"{re.escape(str(table))}, line 3: {message}"):
        read_trace(table)
    source = value if column == "priority" and value != "high" else repr(value)
    lines = write(tmp_path, f"{LINE}\n{LINE[:-1].replace('request_id=0', 'request_id=1')}, {column}={source})\n")
    with pytest.raises(TraceError, match=f"{re.escape(str(lines))}, line 2: {message}"):
        read_trace(lines)


def test_fields_that_no_request_has_are_empty_cells_and_missing_in_lines(tmp_path: Path) -> None:
    late = replace(REQUEST, request_id="1", on_late="refuse", priority=3)
    write_trace([REQUEST, late], tmp_path / "trace.csv")
    with (tmp_path / "trace.csv").open(newline="") as file:
        rows = [(row["on_late"], row["priority"]) for row in csv.DictReader(file)]
    assert rows == [("", ""), ("refuse", "3")]
    write_trace([REQUEST, late], tmp_path / "trace.txt")
    first, second = (tmp_path / "trace.txt").read_text().splitlines()
    assert ("on_late" in first, "priority" in first) == (False, False)
    assert second.endswith("on_late='refuse', priority=3)")
