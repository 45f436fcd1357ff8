"""Loads tables from a shipped name, a CSV file or a directory of CSV files, and makes tables of D alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from profiler.cost_model import CostModel
from profiler.tables.links import INSTANT_LINKS, LinkSpeeds
from profiler.tables.rows import LinksRow, ProfileTable, is_table, list_shipped_tables, read_shipped_table, read_table
from tridentserve.errors import ProfileError
from tridentserve.stages import Stage

TableSource = ProfileTable | Path | str


def load_cost_model(sources: Iterable[TableSource], device: str, links: LinkSpeeds | None = None) -> CostModel:
    """The cost model of a device from tables, named as for `load_tables`. Raises `ProfileError`."""
    return CostModel(load_tables(sources), device, links)


def load_tables(sources: Iterable[TableSource]) -> tuple[ProfileTable, ...]:
    """Each source is a table, the name of a shipped one, the path of a CSV file or a directory (all tables in it).
    Raises `ProfileError` for what does not exist or cannot be read, and for a directory without tables."""
    return tuple(table for source in sources for table in _read_tables(source))


def _read_tables(source: TableSource) -> Iterator[ProfileTable]:
    if isinstance(source, ProfileTable):
        yield source
    elif str(source) in list_shipped_tables():
        yield read_shipped_table(str(source))
    elif Path(source).is_dir():
        paths = sorted(path for path in Path(source).glob("*.csv") if is_table(path))
        if not paths:
            raise ProfileError(
                f"{source}: no profile table is in this directory; write one with scripts/profile_model.py"
            )
        yield from map(read_table, paths)
    elif isinstance(source, Path) or source.endswith(".csv"):
        yield read_table(source)
    else:
        yield read_shipped_table(source)


def keep_diffuse_only(table: ProfileTable) -> ProfileTable:
    """The table with ENCODE, DECODE, transfers and loads that take no time, to judge a policy by D alone. Memory stays
    as it is. Written as a file, it serves wherever a table does."""
    rows = tuple(row if row.stage is Stage.DIFFUSE else replace(row, seconds=0.0) for row in table.rows)
    links = tuple(LinksRow(gpu, INSTANT_LINKS, "modelled: no time") for gpu in sorted({row.gpu for row in rows}))
    return replace(table, rows=rows, links=links)
