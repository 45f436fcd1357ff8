"""Runs the cells that a store does not have yet, with a bar of progress, so that an interrupted run goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from lib.evaluate.cells import Cell, Settings
from lib.evaluate.kept.store import CellStore
from lib.evaluate.runner import run_cells

_ROOT = Path(__file__).resolve().parents[3]


def run_missing(cells: Sequence[Cell], settings: Settings, store: CellStore, jobs: int, command: str) -> int:
    """Adds each cell to the store as soon as it is finished. Returns the exit status: 0 when all have a result, 1 when
    any failed, 130 after Ctrl-C."""
    missing = [cell for cell in cells if cell not in store]
    failed = 0
    facts = {"version": _find_version(), "command": command}
    older = store.versions - {facts["version"]}
    if older:
        print(
            f"evaluate: finished cells of version {', '.join(sorted(older))} are kept (now {facts['version']}); remove "
            f"{store.path} to run them again",
            file=sys.stderr,
        )
    with tqdm(total=len(cells), initial=len(cells) - len(missing), unit="cell", file=sys.stderr) as bar:
        try:
            for cell, result in run_cells(missing, settings, jobs):
                if isinstance(result, str):
                    failed += 1
                    bar.write(f"evaluate: {cell.name}: {result}", file=sys.stderr)
                else:
                    store.add(cell, replace(result, row=result.row | facts))
                bar.set_postfix_str(cell.name)
                bar.update()
        except KeyboardInterrupt:
            bar.write("evaluate: interrupted; the same command resumes from here", file=sys.stderr)
            return 130
    return 1 if failed else 0


def _find_version() -> str:
    """The commit, marked when files were changed since; outside a checkout the version of the package."""
    asked = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return version("tridentserve")
