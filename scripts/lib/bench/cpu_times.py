"""CPU time of the processes of a service on this machine, by kind. Linux only: the times are those of /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Parts of the names of processes, in the order in which they are looked for.
_KINDS = {
    "Scheduler": "scheduler",
    ":Api": "api",
    "Proxy": "proxy",
    "/haproxy": "proxy",
    "StageWorker": "workers",
    "raylet": "raylet",
}
PROCESS_KINDS = tuple(dict.fromkeys(_KINDS.values()))


def read_cpu_seconds() -> dict[str, float]:
    """The CPU time so far of all Ray processes of each kind on this machine, dead ones left out."""
    found: defaultdict[str, float] = defaultdict(float)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            name = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            # The fields behind the command in brackets, which may have spaces; user and system time are 12th and 13th.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        kind = next((kind for part, kind in _KINDS.items() if part in name), None)
        if kind is not None:
            found[kind] += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return found
