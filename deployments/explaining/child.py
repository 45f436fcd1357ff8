"""The process in which a log is run again: it gets a pickled task, and writes explanations as lines of JSON, the first
one without re-runs. It gives way to all other processes."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from typing import IO, Any, cast

from deployments.config.app import AppArgs
from deployments.explaining.explain import explain, explain_by_log
from deployments.explaining.rerun import LogRerun
from tridentserve.errors import TridentServeError
from tridentserve.plans import PlacementPlan
from tridentserve.scheduling.decision_log import LogEntry
from tridentserve.scheduling.explanation.chronicle import Chronicle
from tridentserve.scheduling.explanation.explanation import Explanation, to_plain
from tridentserve.scheduling.explanation.recording import Recording

_NICENESS = 10


def main() -> None:
    os.nice(_NICENESS)
    first, *chunks = _read_pickles(sys.stdin.buffer)
    args, placement, request_id, limit_s = cast("tuple[AppArgs, PlacementPlan | None, str, float]", first)
    recording = Recording([entry for chunk in cast("list[list[LogEntry]]", chunks) for entry in chunk], placement)
    chronicle = Chronicle(recording.entries, recording.placement)
    _write(explain_by_log(chronicle, request_id, "the log could not be run again in time"))
    try:
        _write(explain(LogRerun(args, recording), request_id, limit_s))
    except TridentServeError as error:
        _write(explain_by_log(chronicle, request_id, str(error)))


def _read_pickles(pipe: IO[bytes]) -> Iterator[Any]:
    while True:
        try:
            yield pickle.load(pipe)  # noqa: S301  the process at the other end has started this one
        except EOFError:
            return


def _write(explanation: Explanation) -> None:
    sys.stdout.write(json.dumps(to_plain(explanation)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
