"""Lines that every benchmark prints: first the machine and the command, last one JSON object with all figures."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any


def describe_run(*details: str, libraries: tuple[str, ...] = (), command: str | None = None) -> dict[str, str]:
    """Print the machine, with `details` and the versions of `libraries`, and the command (default: of this process).
    Returns both as the first entries of the JSON object."""
    parts = [platform.platform(), f"{os.cpu_count()} cores", f"load {os.getloadavg()[0]:.1f}", *details]
    parts += [f"{library} {version(library)}" for library in libraries]
    run = {"machine": ", ".join(parts), "command": command or shlex.join(["python", *sys.argv])}
    for name, text in run.items():
        print(f"{name}: {text}", flush=True)
    return run


def print_result(run: Mapping[str, str], figures: Mapping[str, Any]) -> None:
    """Print the last line. JSON knows no NaN and no infinity: such a figure is null."""
    print(json.dumps(_replace_nan({**run, **figures}), allow_nan=False), flush=True)


def _replace_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _replace_nan(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def list_figures(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All entries of a JSON object that are no objects or lists themselves, by their path, such as `rows.0.p50_ms`."""
    if isinstance(value, Mapping | list):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries:
            yield from list_figures(entry, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
