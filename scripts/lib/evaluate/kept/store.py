"""Finished cells on disk: one JSON line each, so that a run that was cut off resumes where it stopped."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from deployments.assembly.options import describe_options
from lib.evaluate.cells import Cell, Settings
from lib.evaluate.rows import CellResult
from tridentserve.errors import ConfigError


class CellStore(Protocol):
    """A place where finished cells are kept."""

    path: Path
    """The file that holds them."""

    @property
    def versions(self) -> set[str]:
        """The commits that the finished cells are of."""

    def __contains__(self, cell: Cell) -> bool:
        """True when the cell is finished."""

    def add(self, cell: Cell, result: CellResult) -> None:
        """Keeps a finished cell; it is on disk when this returns."""


class Store:
    """The cells of one folder, in `cells.jsonl`."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Reads what is there. Raises `ConfigError` when the folder holds cells of other settings: they could not be
        compared."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "cells.jsonl"
        stated = asdict(settings) | {"options": describe_options(settings.make_options())}
        self._settings = json.loads(json.dumps(stated))  # as it is read: tuples are lists there
        self._cells: dict[Cell, CellResult] = {}
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines):  # the last one was cut off
            self.path.write_bytes(b"".join(whole))
        for line in whole:
            self._take(json.loads(line))

    def _take(self, kept: dict[str, Any]) -> None:
        if kept["settings"] != self._settings:
            raise ConfigError(
                f"{self.path.parent} holds results of other settings ({kept['settings']}, now {self._settings}); "
                f"use another --out, or remove it"
            )
        self._cells[Cell(**kept["cell"])] = CellResult(kept["row"], kept["details"])

    def __contains__(self, cell: Cell) -> bool:
        return cell in self._cells

    def add(self, cell: Cell, result: CellResult) -> None:
        """Keeps a finished cell; it is on disk when this returns."""
        self._cells[cell] = result
        line = {"cell": asdict(cell), "settings": self._settings, "row": result.row, "details": result.details}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def versions(self) -> set[str]:
        """The commits that the finished cells are of."""
        return {str(result.row["version"]) for result in self._cells.values()}

    @property
    def results(self) -> dict[Cell, CellResult]:
        """All finished cells, sorted."""
        return dict(sorted(self._cells.items(), key=lambda entry: entry[0]))
