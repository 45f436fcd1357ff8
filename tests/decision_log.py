"""Decision logs, as tests read them."""

from __future__ import annotations

from pathlib import Path

from tridentserve.scheduling.decision_log import Decision, decode_decision


def read_log(path: Path) -> list[Decision]:
    """All decisions of a log, in order."""
    return [decode_decision(line) for line in path.read_text().splitlines()]
