"""CSV files that people edit, read strictly: every complaint names the file and the line, and says what to do."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tridentserve.errors import ProfileError
from tridentserve.stages import Stage

SOURCES = ("measured", "published", "modelled")


@dataclass(frozen=True, slots=True)
class CsvLine:
    """One row as text, with where it stands, so that every complaint names file and line."""

    file: str
    number: int
    cells: dict[str, str]

    def build_error(self, message: str) -> ProfileError:
        return ProfileError(f"{self.file}:{self.number}: {message}")

    def read_text(self, column: str) -> str:
        if not self.cells[column]:
            raise self.build_error(f"{column} is empty; fill it in")
        if not self.cells[column].isprintable():
            raise self.build_error(f"{column} is {self.cells[column]!r}; leave out characters that cannot be printed")
        return self.cells[column]

    def read_integer(self, column: str, minimum: int = 0) -> int:
        try:
            value = int(self.read_text(column))
        except ValueError:
            raise self.build_error(f"{column} is {self.cells[column]!r}; give a whole number") from None
        if value < minimum:
            raise self.build_error(f"{column} is {value}; it must be at least {minimum}")
        return value

    def read_seconds(self, column: str, *, may_be_0: bool) -> float:
        value = self._read_number(column, "a number of seconds")
        if not (math.isfinite(value) and (value > 0 or (may_be_0 and value == 0))):
            least = "at least 0" if may_be_0 else "above 0"
            raise self.build_error(f"{column} is {value}; it must be {least} and finite: measure this point again")
        return value

    def read_amount(self, column: str) -> float:
        """Zero or more, and finite."""
        value = self._read_number(column, "a number")
        if not (math.isfinite(value) and value >= 0):
            raise self.build_error(f"{column} is {value}; it must be at least 0 and finite")
        return value

    def read_speed(self, column: str) -> float:
        """Bytes per second; `inf` where moving costs no time."""
        value = self._read_number(column, "a number of bytes per second, or inf")
        if not value > 0:
            raise self.build_error(f"{column} is {value}; it must be above 0 (inf: moving costs no time)")
        return value

    def _read_number(self, column: str, what: str) -> float:
        try:
            return float(self.read_text(column))
        except ValueError:
            raise self.build_error(f"{column} is {self.cells[column]!r}; give {what}") from None

    def read_stage(self) -> Stage:
        try:
            return Stage(self.read_text("stage"))
        except ValueError:
            known = ", ".join(Stage)
            raise self.build_error(f"stage is {self.cells['stage']!r}; it must be one of {known}") from None

    def read_source(self) -> str:
        source = self.read_text("source")
        if source.partition(":")[0] not in SOURCES:
            raise self.build_error(f"source is {source!r}; start it with one of {', '.join(SOURCES)}")
        return source


def read_csv_lines(path: Path, columns: tuple[str, ...]) -> Iterator[CsvLine]:
    """The rows of a CSV file with exactly these columns, in any order; blank lines are skipped."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file; write it with scripts/profile_model.py") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if header is None:
                header = cells
                _check_header(f"{path.name}:{reader.line_num}", header, columns)
            elif len(cells) != len(columns):
                message = f"{len(cells)} cells where the header has {len(columns)}; one cell per column"
                raise ProfileError(f"{path.name}:{reader.line_num}: {message}")
            else:
                yield CsvLine(path.name, reader.line_num, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise ProfileError(f"{path.name}:{reader.line_num}: not CSV ({error})") from error
    if header is None:
        raise ProfileError(f"{path.name}:1: the file is empty; its first line must be {','.join(columns)}")


def _check_header(where: str, header: list[str], columns: tuple[str, ...]) -> None:
    missing = [column for column in columns if column not in header]
    unknown = [column for column in header if column not in columns]
    if missing or unknown or len(header) != len(columns):
        raise ProfileError(
            f"{where}: the header must hold exactly {','.join(columns)} "
            f"(missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'})"
        )


def write_csv(path: Path, columns: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    """Replace the file at once: whoever reads meanwhile, and whoever stops this, finds the old one or the new one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(rows)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
