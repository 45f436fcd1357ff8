"""Profile tables: what was measured (or published, or modelled) of each stage, as CSV files people can read and edit.

A table is two files. `NAME.csv` holds times and activation memory, one row per point; `NAME.weights.csv`, next to it,
holds the bytes of each stage's weights, which do not depend on the point, and of what it hands on. A third,
`NAME.links.csv`, may say how fast the links of a device are. All are checked strictly when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from profiler.tables.csv_lines import CsvLine, read_csv_lines, write_csv
from profiler.tables.links import LinkSpeeds
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
WEIGHTS_COLUMNS = ("model", "stage", "weights_bytes", "output_bytes", "output_bytes_per_token", "source")
_SPEEDS = tuple(field.name for field in fields(LinkSpeeds))
LINKS_COLUMNS = ("gpu", *_SPEEDS, "source")
_SHIPPED = Path(__file__).parents[1] / "data"


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One profiled point."""

    model: str
    """The model, as deployments name it."""
    gpu: str
    """The name that workers give their device."""
    stage: Stage
    """The stage that ran."""
    shape: Shape
    """The size of the output."""
    degree: int
    """The number of workers that ran it together, a power of two."""
    batch: int
    """The number of outputs at once."""
    seconds: float
    """Seconds per denoising step for DIFFUSE, per call for ENCODE and DECODE."""
    peak_bytes: int
    """The peak of the activations on one worker in bytes, weights not counted."""
    source: str
    """It starts with measured, published or modelled; a reference may follow after a colon."""

    @property
    def key(self) -> tuple[str, str, Stage, Shape, int, int]:
        """The key of the row, which is unique in a table."""
        return (self.model, self.gpu, self.stage, self.shape, self.degree, self.batch)


@dataclass(frozen=True, slots=True)
class WeightsRow:
    """Bytes of the weights of one stage of one model, in the number format it is served in.

    A stage hands `output_bytes + output_bytes_per_token x Shape.tokens` bytes per output to the next one (the
    condition, the latents) or to the client (pixels).
    """

    model: str
    stage: Stage
    weights_bytes: int
    source: str
    output_bytes: int = 0
    output_bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class LinksRow:
    """The links of one kind of device."""

    gpu: str
    speeds: LinkSpeeds
    source: str


@dataclass(frozen=True, slots=True)
class ProfileTable:
    """The rows of one table."""

    name: str
    """The name of its file, for error messages."""
    rows: tuple[ProfileRow, ...]
    weights: tuple[WeightsRow, ...]
    links: tuple[LinksRow, ...] = ()


def collect_rows(tables: Iterable[ProfileTable], model: str) -> frozenset[ProfileRow | WeightsRow]:
    """All that tables hold of a model, on whatever device."""
    rows: list[ProfileRow | WeightsRow] = []
    for table in tables:
        rows += [row for row in table.rows if row.model == model]
        rows += [row for row in table.weights if row.model == model]
    return frozenset(rows)


def derive_weights_path(path: Path) -> Path:
    """The file of the weights that belongs to a table's file: `NAME.weights.csv` next to `NAME.csv`."""
    return path.with_suffix(".weights.csv")


def derive_links_path(path: Path) -> Path:
    """The file of the link speeds that may belong to a table's file: `NAME.links.csv` next to `NAME.csv`."""
    return path.with_suffix(".links.csv")


def is_table(path: Path) -> bool:
    """True when a CSV file is a table itself, not the file of weights or links of one."""
    return not path.stem.endswith((".weights", ".links"))


def list_shipped_tables() -> list[str]:
    """The tables that come with TridentServe, without `.csv`."""
    return sorted(path.stem for path in _SHIPPED.glob("*.csv") if is_table(path))


def read_shipped_table(name: str) -> ProfileTable:
    """A table that comes with TridentServe, by its name without `.csv`.

    Raises `ProfileError`, with the names there are, when there is none of this name.
    """
    names = list_shipped_tables()
    if name not in names:
        raise ProfileError(f"no shipped profile table is named {name!r}; there are: {', '.join(names) or 'none'}")
    return read_table(_SHIPPED / f"{name}.csv")


def read_table(path: Path | str) -> ProfileTable:
    """Read a table and its weights.

    Raises `ProfileError` with file, line, what is wrong and what to do: a missing file or column, a value that is not a
    number in range, an unknown stage or source, a degree that is no power of two, a point or a stage that comes twice.
    """
    path = Path(path)
    rows: dict[tuple[str, str, Stage, Shape, int, int], ProfileRow] = {}
    for line in read_csv_lines(path, COLUMNS):
        row = _parse_profile_row(line)
        if row.key in rows:
            raise line.build_error(
                f"{row.model} {row.stage} {row.shape} at degree {row.degree} comes twice; keep one row"
            )
        rows[row.key] = row
    weights: dict[tuple[str, Stage], WeightsRow] = {}
    for line in read_csv_lines(derive_weights_path(path), WEIGHTS_COLUMNS):
        held = _parse_weights_row(line)
        if (held.model, held.stage) in weights:
            raise line.build_error(f"{held.model} {held.stage} comes twice; keep one row")
        weights[held.model, held.stage] = held
    links: dict[str, LinksRow] = {}
    for line in read_csv_lines(derive_links_path(path), LINKS_COLUMNS) if derive_links_path(path).exists() else ():
        row_of_links = _parse_links_row(line)
        if row_of_links.gpu in links:
            raise line.build_error(f"{row_of_links.gpu} comes twice; keep one row")
        links[row_of_links.gpu] = row_of_links
    return ProfileTable(path.name, tuple(rows.values()), tuple(weights.values()), tuple(links.values()))


def write_table(path: Path | str, table: ProfileTable) -> None:
    """Write a table, its weights and, if it has any, its links, so that `read_table` gives the same rows back. Seconds
    keep six digits. A file of links that is there already is kept when the table has none: people write it, not tools.

    Each file is replaced at once: whoever reads meanwhile, and whoever stops this, finds the old file or the new one.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(derive_weights_path(path), WEIGHTS_COLUMNS, map(_format_weights_row, table.weights))
    if table.links:
        write_csv(derive_links_path(path), LINKS_COLUMNS, map(_format_links_row, table.links))
    write_csv(path, COLUMNS, map(_format_profile_row, table.rows))


def _format_profile_row(row: ProfileRow) -> tuple[object, ...]:
    shape = row.shape
    where = (row.model, row.gpu, row.stage.value, shape.height, shape.width, shape.num_frames)
    return (*where, row.degree, row.batch, f"{row.seconds:.6g}", row.peak_bytes, row.source)


def _format_weights_row(row: WeightsRow) -> tuple[object, ...]:
    output = (row.output_bytes, f"{row.output_bytes_per_token:.12g}")
    return (row.model, row.stage.value, row.weights_bytes, *output, row.source)


def _format_links_row(row: LinksRow) -> tuple[object, ...]:
    return (row.gpu, *(f"{getattr(row.speeds, name):.12g}" for name in _SPEEDS), row.source)


def _parse_weights_row(line: CsvLine) -> WeightsRow:
    return WeightsRow(
        model=line.read_text("model"),
        stage=line.read_stage(),
        weights_bytes=line.read_integer("weights_bytes"),
        source=line.read_source(),
        output_bytes=line.read_integer("output_bytes"),
        output_bytes_per_token=line.read_amount("output_bytes_per_token"),
    )


def _parse_links_row(line: CsvLine) -> LinksRow:
    speeds = {name: line.read_speed(name) if name.endswith("_per_s") else line.read_amount(name) for name in _SPEEDS}
    return LinksRow(line.read_text("gpu"), LinkSpeeds(**speeds), line.read_source())


def _parse_profile_row(line: CsvLine) -> ProfileRow:
    degree = line.read_integer("degree", minimum=1)
    if degree & (degree - 1):
        raise line.build_error(f"degree {degree} is not a power of two; use 1, 2, 4, 8, ...")
    stage = line.read_stage()
    return ProfileRow(
        model=line.read_text("model"),
        gpu=line.read_text("gpu"),
        stage=stage,
        shape=Shape(line.read_integer("height", 1), line.read_integer("width", 1), line.read_integer("num_frames", 1)),
        degree=degree,
        batch=line.read_integer("batch", minimum=1),
        # E and C of 0 seconds leave D alone to judge a policy by; D itself always takes time.
        seconds=line.read_seconds("seconds", may_be_0=stage is not Stage.DIFFUSE),
        peak_bytes=line.read_integer("peak_bytes"),
        source=line.read_source(),
    )
