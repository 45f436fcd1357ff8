"""Profile tables: what was measured (or published, or modelled) of each stage, as CSV files people can read and edit.

A table is two files. `NAME.csv` holds times and activation memory, one row per point; `NAME.weights.csv`, beside it,
holds the bytes of each stage's weights, which do not depend on the point. Both are checked strictly when they are read.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tridentserve.errors import ProfileError
from tridentserve.requests import Shape
from tridentserve.stages import Stage

COLUMNS = (
    "model",
    "gpu",
    "stage",
    "height",
    "width",
    "num_frames",
    "degree",
    "batch",
    "seconds",
    "peak_bytes",
    "source",
)
WEIGHTS_COLUMNS = ("model", "stage", "weights_bytes", "source")
SOURCES = ("measured", "published", "modelled")
_SHIPPED = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One profiled point. `seconds` is per denoising step for DIFFUSE and per call for ENCODE and DECODE;
    `peak_bytes` is the peak of the activations on one worker, weights not counted; `gpu` is the name workers give
    their device. `source` starts with measured, published or modelled; a reference may follow after a colon."""

    model: str
    gpu: str
    stage: Stage
    shape: Shape
    degree: int
    batch: int
    seconds: float
    peak_bytes: int
    source: str

    @property
    def key(self) -> tuple[str, str, Stage, Shape, int, int]:
        """What must be unique in a table."""
        return (self.model, self.gpu, self.stage, self.shape, self.degree, self.batch)


@dataclass(frozen=True, slots=True)
class WeightsRow:
    """Bytes of the weights of one stage of one model, in the number format it is served in."""

    model: str
    stage: Stage
    weights_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class ProfileTable:
    """The rows of one table; `name` is its file, for error messages."""

    name: str
    rows: tuple[ProfileRow, ...]
    weights: tuple[WeightsRow, ...]


def weights_path(path: Path) -> Path:
    """The file of the weights that belongs to a table's file: `NAME.weights.csv` beside `NAME.csv`."""
    return path.with_suffix(".weights.csv")


def shipped_table(name: str) -> ProfileTable:
    """A table that comes with TridentServe, by its name without `.csv`.

    Raises `ProfileError`, with the names there are, when there is none of this name.
    """
    names = sorted(path.stem for path in _SHIPPED.glob("*.csv") if not path.stem.endswith(".weights"))
    if name not in names:
        raise ProfileError(f"no shipped profile table is named {name!r}; there are: {', '.join(names) or 'none'}")
    return read_table(_SHIPPED / f"{name}.csv")


def read_table(path: Path | str) -> ProfileTable:
    """Read a table and its weights.

    Raises `ProfileError` with file, line, what is wrong and what to do: a missing file or column, a value that is not a
    positive number, an unknown stage or source, a degree that is no power of two, a point or a stage that comes twice.
    """
    path = Path(path)
    rows: dict[tuple[str, str, Stage, Shape, int, int], ProfileRow] = {}
    for line in _lines(path, COLUMNS):
        row = _profile_row(line)
        if row.key in rows:
            raise line.error(f"{row.model} {row.stage} {row.shape} at degree {row.degree} comes twice; keep one row")
        rows[row.key] = row
    weights: dict[tuple[str, Stage], WeightsRow] = {}
    for line in _lines(weights_path(path), WEIGHTS_COLUMNS):
        held = WeightsRow(line.text("model"), line.stage(), line.integer("weights_bytes"), line.source())
        if (held.model, held.stage) in weights:
            raise line.error(f"{held.model} {held.stage} comes twice; keep one row")
        weights[held.model, held.stage] = held
    return ProfileTable(path.name, tuple(rows.values()), tuple(weights.values()))


def write_table(path: Path | str, table: ProfileTable) -> None:
    """Write a table and its weights, so that `read_table` gives the same rows back. Seconds keep six digits.

    Each file is replaced at once: whoever reads meanwhile, and whoever stops this, finds the old file or the new one.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    held = ((row.model, row.stage.value, row.weights_bytes, row.source) for row in table.weights)
    _replace(weights_path(path), WEIGHTS_COLUMNS, held)
    _replace(path, COLUMNS, map(_cells, table.rows))


def _cells(row: ProfileRow) -> tuple[object, ...]:
    shape = row.shape
    where = (row.model, row.gpu, row.stage.value, shape.height, shape.width, shape.num_frames)
    return (*where, row.degree, row.batch, f"{row.seconds:.6g}", row.peak_bytes, row.source)


def _replace(path: Path, columns: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(rows)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _profile_row(line: _Line) -> ProfileRow:
    degree = line.integer("degree", minimum=1)
    if degree & (degree - 1):
        raise line.error(f"degree {degree} is not a power of two; use 1, 2, 4, 8, ...")
    return ProfileRow(
        model=line.text("model"),
        gpu=line.text("gpu"),
        stage=line.stage(),
        shape=Shape(line.integer("height", 1), line.integer("width", 1), line.integer("num_frames", 1)),
        degree=degree,
        batch=line.integer("batch", minimum=1),
        seconds=line.seconds("seconds"),
        peak_bytes=line.integer("peak_bytes"),
        source=line.source(),
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """One row as text, with where it stands, so that every complaint names file and line."""

    file: str
    number: int
    cells: dict[str, str]

    def error(self, message: str) -> ProfileError:
        return ProfileError(f"{self.file}:{self.number}: {message}")

    def text(self, column: str) -> str:
        if not self.cells[column]:
            raise self.error(f"{column} is empty; fill it in")
        if not self.cells[column].isprintable():
            raise self.error(f"{column} is {self.cells[column]!r}; leave out characters that cannot be printed")
        return self.cells[column]

    def integer(self, column: str, minimum: int = 0) -> int:
        try:
            value = int(self.text(column))
        except ValueError:
            raise self.error(f"{column} is {self.cells[column]!r}; give a whole number") from None
        if value < minimum:
            raise self.error(f"{column} is {value}; it must be at least {minimum}")
        return value

    def seconds(self, column: str) -> float:
        try:
            value = float(self.text(column))
        except ValueError:
            raise self.error(f"{column} is {self.cells[column]!r}; give a number of seconds") from None
        if not (math.isfinite(value) and value > 0):
            raise self.error(f"{column} is {value}; it must be above 0 and finite: measure this point again")
        return value

    def stage(self) -> Stage:
        try:
            return Stage(self.text("stage"))
        except ValueError:
            known = ", ".join(Stage)
            raise self.error(f"stage is {self.cells['stage']!r}; it must be one of {known}") from None

    def source(self) -> str:
        source = self.text("source")
        if source.partition(":")[0] not in SOURCES:
            raise self.error(f"source is {source!r}; start it with one of {', '.join(SOURCES)}")
        return source


def _lines(path: Path, columns: tuple[str, ...]) -> Iterator[_Line]:
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
                yield _Line(path.name, reader.line_num, dict(zip(header, cells, strict=True)))
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
