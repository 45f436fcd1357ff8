"""Decision logs as the scripts read them."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import ValidationError

from tridentserve.errors import TridentServeError
from tridentserve.scheduling.decision_log import LogEntry, decode_entry


def read_decisions(path: Path, script: str) -> list[LogEntry]:
    """All decisions of a log. A service that runs, or was killed, may have written a part of the last line only; then
    `script` says so. Raises `TridentServeError` for what is no log."""
    complete, _, rest = path.read_text(encoding="utf-8").rpartition("\n")
    if rest:
        print(f"{script}: {path}: the last line is incomplete and is left out", file=sys.stderr)
    decisions = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            decisions.append(decode_entry(line))
        except ValidationError as error:
            raise TridentServeError(f"{path}:{number}: not a decision ({error.error_count()} problems)") from error
    return decisions
