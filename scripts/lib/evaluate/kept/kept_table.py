"""A CSV file that keeps short rows of cells from one run to the next, beside a page that shows them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import Field, astuple, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import pandas as pd

from lib.evaluate.cells import Cell, Settings
from lib.evaluate.rows import CellResult
from tridentserve.errors import ConfigError

# Digits that are kept of shares and seconds: more would differ for no reason that matters.
_DIGITS = 6


class KeptRow(Protocol):
    """A row of such a file: a dataclass of numbers and texts."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def version(self) -> str:
        """The commit of the code."""

    @classmethod
    def from_result(cls, cell: Cell, result: CellResult) -> Self:
        """The row of a finished cell."""

    @classmethod
    def make_key(cls, cell: Cell, settings: Settings) -> tuple[Hashable, ...]:
        """The `key` of the row that a cell has with these settings."""

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The values that tell the row from all others; rows are sorted by it."""


AnyKeptRow = TypeVar("AnyKeptRow", bound=KeptRow)


class KeptTable(Generic[AnyKeptRow]):
    """A CSV file with a row for each cell, in the order of their keys."""

    def __init__(self, path: Path, row_type: type[AnyKeptRow], settings: Settings) -> None:
        """Reads the file, where there is one. Raises `ConfigError` when it is no such table."""
        self.path = path
        self._row_type = row_type
        self._settings = settings
        self._rows = {row.key: row for row in read_rows(path, row_type)} if path.exists() else {}

    def __contains__(self, cell: Cell) -> bool:
        return self.find(cell) is not None

    def find(self, cell: Cell) -> AnyKeptRow | None:
        """The row of a cell, if it is finished."""
        return self._rows.get(self._row_type.make_key(cell, self._settings))

    def add(self, cell: Cell, result: CellResult) -> None:
        """Keeps a finished cell; it is on disk when this returns."""
        row = self._row_type.from_result(cell, result)
        self._rows[row.key] = row
        self._rows = dict(sorted(self._rows.items()))
        frame = pd.DataFrame([astuple(row) for row in self._rows.values()], columns=_list_names(self._row_type))
        draft = self.path.with_name(f"{self.path.name}.part")
        frame.to_csv(draft, index=False, lineterminator="\n")
        draft.replace(self.path)

    @property
    def versions(self) -> set[str]:
        """The commits that the rows are of."""
        return {row.version for row in self._rows.values()}

    @property
    def rows(self) -> list[AnyKeptRow]:
        """All rows, sorted."""
        return list(self._rows.values())


def read_rows(path: Path, row_type: type[AnyKeptRow]) -> list[AnyKeptRow]:
    """The rows of a file. Raises `ConfigError` when it has others."""
    try:
        frame = pd.read_csv(path, dtype={"version": str})  # 5e95655 is a commit, not a number
    except ValueError as error:
        raise ConfigError(f"{path} is no table of cells: {error}") from None
    if list(frame.columns) != (names := _list_names(row_type)):
        raise ConfigError(f"{path} is no table of such cells: its columns are not {', '.join(names)}")
    return [row_type(*values) for values in frame.itertuples(index=False)]


def shorten(value: float) -> float:
    """A share or seconds with the digits that are kept."""
    return float(f"{value:.{_DIGITS}g}")


def _list_names(row_type: type[KeptRow]) -> list[str]:
    return [field.name for field in fields(row_type)]
