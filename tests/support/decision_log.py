"""LogEntry logs, as tests read them."""

from __future__ import annotations

from pathlib import Path

from tridentserve.scheduling.decision_log import LogEntry, decode_entry


def read_log(path: Path) -> list[LogEntry]:
    """All decisions of a log, in order."""
    return [decode_entry(line) for line in path.read_text().splitlines()]
