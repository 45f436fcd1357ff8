"""A decision log can be read while the service writes it."""

from __future__ import annotations

from pathlib import Path

from tests.support.decision_log import read_lines


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("")
    assert read_lines(log) == []
    log.write_text('{"a": 1}\n{"b": "half of')
    assert read_lines(log) == ['{"a": 1}']
    log.write_text('{"a": 1}\n{"b": 2}\n')
    assert read_lines(log) == ['{"a": 1}', '{"b": 2}']
