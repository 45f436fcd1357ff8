"""ServeGen client chunks (Apache-2.0): the arrivals of one client as ten-minute bins, without a header.

A row is `start_s, rate, cv, distribution, arg1, arg2`. A bin is sampled as a stationary process of its rate, CV and
distribution; the two arguments, a fit of the distribution whose mean differs from the rate, are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from traces.formats.text import list_csv_cells, make_line_error, parse_number
from traces.requests import quote
from traces.workloads.arrivals import MAX_CV, MIN_CV, Arrival, Phase, Process, draw_phases
from tridentserve.errors import TraceError

NAME = "ServeGen chunk"
FIRST_ROW = "start_s, rate, cv, distribution, arg1, arg2 as values, no header"
_BIN_S = 600.0
_CELLS = 6
# A bin without requests has no distribution.
_PROCESSES: dict[str, Process] = {"Gamma": "gamma", "Weibull": "weibull", "Exponential": "poisson", "": "constant"}


def recognises(cells: Sequence[str]) -> bool:
    """True when this is the first row of such a file."""
    if len(cells) != _CELLS:
        return False
    try:
        parse_number("start_s", cells[0])
    except TraceError:
        return False
    return True


def read(text: str, path: str | Path, seed: int) -> list[Arrival]:
    """Arrivals drawn with the seed, ascending; time 0 is that of the file. `TraceError` with the line number."""
    steps: list[Phase] = []
    now_s = 0.0
    for line, cells in list_csv_cells(text, path):
        try:
            start_s, step = _read_bin(cells)
            if start_s < now_s:
                raise TraceError(f"the bin begins at {start_s:g} s, before the one ahead of it ends ({now_s:g} s)")
        except TraceError as error:
            raise make_line_error(path, line, str(error)) from None
        steps += [Phase(start_s - now_s, 0.0), step]
        now_s = start_s + _BIN_S
    return [Arrival(time_s) for time_s in draw_phases(steps, seed)]


def _read_bin(cells: Sequence[str]) -> tuple[float, Phase]:
    if len(cells) != _CELLS:
        raise TraceError(f"{len(cells)} cells where a bin has {_CELLS}")
    distribution = cells[3].strip()
    if distribution not in _PROCESSES:
        known = ", ".join(filter(None, _PROCESSES))
        raise TraceError(f"the distribution must be {known} or empty, not {quote(distribution)}")
    start_s, rate_per_s, cv, *_ = (
        parse_number(name, cell)
        for name, cell in zip(("start_s", "rate", "cv", "arg1", "arg2"), (*cells[:3], *cells[4:]), strict=True)
    )
    if rate_per_s == 0:
        return start_s, Phase(_BIN_S, 0.0)
    if not distribution:
        raise TraceError(f"a rate of {rate_per_s:g} without a distribution")
    if not MIN_CV <= cv <= MAX_CV:
        raise TraceError(f"cv must be from {MIN_CV:g} to {MAX_CV:g}, not {cv:g}")
    return start_s, Phase(_BIN_S, rate_per_s, _PROCESSES[distribution], cv)
