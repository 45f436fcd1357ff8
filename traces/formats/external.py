"""Traces of others, which tell when requests came but not what size they asked for: sizes are drawn from a mix.

Each format is a module of its own; which one a file is in is seen from its first row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from traces.formats import alibaba, azure, servegen
from traces.formats.text import list_csv_cells, make_line_error, read_text
from traces.requests import TraceRequest, quote
from traces.workloads.arrivals import Arrival
from traces.workloads.mixes import Mix, draw
from tridentserve.errors import ConfigError, TraceError

_FORMATS = (azure, alibaba, servegen)


@dataclass(frozen=True, slots=True)
class DrawnTrace:
    """Requests made from a trace of others. `provenance` says what is real in them and what was drawn, for people: it
    belongs ahead of the requests in a file (the `comment` of `write_trace`)."""

    requests: list[TraceRequest]
    provenance: str


def read_external(
    path: str | Path,
    mix: Mix,
    seed: int = 0,
    *,
    start_s: float = 0.0,
    duration_s: float | None = None,
) -> DrawnTrace:
    """The arrivals of a published trace, from `start_s` on and for `duration_s`, with sizes drawn from the mix.

    A directory is read as ServeGen chunks of several clients, one in each file. Raises `TraceError`
    with the line number of the first bad row, for a file in none of the formats, and when no request came in that time.
    """
    path = Path(path)
    end_s = float("inf") if duration_s is None else start_s + duration_s
    if not 0 <= start_s < end_s:
        raise ConfigError(f"the start must not be negative and the duration above 0, not {start_s} and {duration_s}")
    name, arrivals = _read_folder(path, seed) if path.is_dir() else _read_file(path, seed)
    taken = [arrival for arrival in arrivals if start_s <= arrival.time_s < end_s]
    if not taken:
        raise TraceError(f"{path}: no request came from {start_s:g} s to {end_s:g} s ({len(arrivals)} came at all)")
    drawn = draw(mix, [arrival.time_s - start_s for arrival in taken], seed)
    requests = [
        replace(request, num_inference_steps=arrival.num_inference_steps or request.num_inference_steps)
        for request, arrival in zip(drawn, taken, strict=True)
    ]
    given = "times and steps" if any(arrival.num_inference_steps for arrival in taken) else "times"
    what = f"{given} from {path.name} ({name}); all else, sizes too, drawn from the mix {mix.name} with seed {seed}"
    return DrawnTrace(requests, what)


def read_arrivals(path: Path, seed: int = 0) -> list[Arrival]:
    """All arrivals of a published trace, or of a directory of ServeGen chunks. Raises `TraceError`."""
    return (_read_folder(path, seed) if path.is_dir() else _read_file(path, seed))[1]


def _read_file(path: Path, seed: int) -> tuple[str, list[Arrival]]:
    text = read_text(path)
    line, first = next(list_csv_cells(text, path), (1, []))
    for known in _FORMATS:
        if known.recognises(first):
            return known.NAME, known.read(text, path, seed)
    formats = "; ".join(f"{known.NAME} ({known.FIRST_ROW})" for known in _FORMATS)
    raise make_line_error(path, line, f"none of {formats}: {quote(','.join(first))}")


def _read_folder(folder: Path, seed: int) -> tuple[str, list[Arrival]]:
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise TraceError(f"{folder} holds no .csv: a directory must hold ServeGen chunks, one per client")
    arrivals = [
        arrival for number, path in enumerate(paths) for arrival in servegen.read(read_text(path), path, seed + number)
    ]
    return f"{servegen.NAME}, {len(paths)} clients", sorted(arrivals, key=lambda arrival: arrival.time_s)
