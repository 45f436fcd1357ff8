"""Decision logs, as tests read them."""

from __future__ import annotations

from pathlib import Path

from tridentserve.scheduling.decision_log import LogEntry, decode_entry


def read_log(path: Path) -> list[LogEntry]:
    """All decisions of a log, in order."""
    return [decode_entry(line) for line in read_lines(path)]


def read_lines(path: Path) -> list[str]:
    """The complete lines of a log. A service that runs may be in the middle of its last one: a long line is written in
    parts."""
    complete, _, _ = path.read_text().rpartition("\n")
    return complete.splitlines()
