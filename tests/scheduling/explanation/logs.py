"""Small logs, of a scheduler that does what the test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.engine.simulated.scripted import Script, simulate
from tests.support.decision_log import read_log
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry
from tridentserve.scheduling.explanation.chronicle import Chronicle
from tridentserve.testing import make_cluster


def write_chronicle(
    folder: Path,
    types: Mapping[str, str],
    arrivals: Mapping[str, float],
    at_arrivals: Mapping[str, Sequence[ev.Effect]],
    after: Mapping[int, Sequence[ev.Effect]] | None = None,
    max_denoising: int | None = None,
    **options: Any,
) -> Chronicle:
    """The chronicle of requests that run by a script: E takes 0.5 s, a step of D 1 s over the degree, C 2 s."""
    path = folder / "log.jsonl"
    simulate(Script(at_arrivals, after), types, arrivals, decision_log=path, **options)
    return Chronicle([_limit(entry, max_denoising) for entry in read_log(path)], make_cluster(types)[1])


def _limit(entry: LogEntry, max_denoising: int | None) -> LogEntry:
    """The entry with workers of which so many may denoise at once."""
    event = entry.event
    if not isinstance(event, ev.WorkerJoined):
        return entry
    return replace(entry, event=replace(event, worker=replace(event.worker, max_denoising=max_denoising)))
