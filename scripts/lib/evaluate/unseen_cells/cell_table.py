"""Short rows of unseen cells, and the CSV file that keeps them from one run to the next."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Self

import pandas as pd

from lib.evaluate.cells import Cell, Settings
from lib.evaluate.rows import CellResult
from tridentserve.errors import ConfigError

# Digits that are kept of shares and seconds: more would differ for no reason that matters.
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class UnseenRow:
    """The figures of one policy in one unseen cell."""

    seed: int
    """The seed that the cell was drawn from."""
    index: int
    """The number of the cell among those of its seed."""
    policy: str
    """The policy that served the cell."""
    models: str
    """The models of the cell, joined by `+`."""
    gpus: int
    """The number of GPUs."""
    load: float
    """The load of the cell (`traces.workloads.unseen.UnseenCell`)."""
    pattern: str
    """The pattern of the arrivals."""
    diffuse_only: bool
    """True where D alone takes time."""
    requests: int
    """The number of requests."""
    on_time: float
    """The share of requests on time."""
    bound: float
    """The largest share on time that the linear program allows."""
    mean_s: float
    """The mean latency of all requests; one without a result counts until the end of the simulation."""
    p95_s: float
    """The 95th percentile of these latencies."""
    unfinished: int
    """The number of requests without a result when the simulation ended."""
    switches: int
    """The number of changes of the placement."""
    cut_short: int
    """The number of decisions whose solve hit its time limit."""
    version: str
    """The commit of the code."""

    @classmethod
    def from_result(cls, cell: Cell, result: CellResult) -> Self:
        """The row of a finished cell."""
        row, parameters = result.row, json.loads(result.row["parameters"])
        return cls(
            seed=cell.seed,
            index=cell.index,
            policy=cell.policy,
            models=cell.model,
            gpus=row["gpus"],
            load=_shorten(parameters["load"]),
            pattern=parameters["pattern"],
            diffuse_only=parameters["diffuse_only"],
            requests=row["requests"],
            on_time=_shorten(row["slo_attainment"]),
            bound=_shorten(row["bound_attainment"]),
            mean_s=_shorten(row["mean_all_s"]),
            p95_s=_shorten(row["p95_all_s"]),
            unfinished=row["unfinished"],
            switches=row["placement_switches"],
            cut_short=row["cut_short"],
            version=row["version"],
        )

    @property
    def key(self) -> tuple[int, int, str]:
        """The cell and the policy, which a table has once."""
        return self.seed, self.index, self.policy


def list_unseen_rows(results: Mapping[Cell, CellResult]) -> list[UnseenRow]:
    """The rows of the unseen cells among some results."""
    return [UnseenRow.from_result(cell, result) for cell, result in results.items() if cell.is_unseen]


class UnseenTable:
    """A CSV file with a row for each unseen cell and policy, in the order of `UnseenRow.key`."""

    def __init__(self, path: Path) -> None:
        """Reads the file, where there is one. Raises `ConfigError` when it is no such table."""
        self.path = path
        self._rows = {row.key: row for row in _read_rows(path)} if path.exists() else {}

    def __contains__(self, cell: Cell) -> bool:
        return _make_key(cell) in self._rows

    def check_cells(self, cells: Iterable[Cell], settings: Settings) -> None:
        """Raises `ConfigError` when the table has other cells by these numbers: with --recorded others are drawn."""
        for cell in cells:
            if (row := self._rows.get(_make_key(cell))) is not None:
                drawn = cell.draw_unseen(settings)
                if (row.gpus, row.load, row.pattern) != (drawn.gpus, _shorten(drawn.load), drawn.pattern):
                    raise ConfigError(
                        f"{self.path} has another cell {cell.seed}-{cell.index} than is asked for; "
                        "it was drawn with --recorded, and now without it, or the other way round"
                    )

    def add(self, cell: Cell, result: CellResult) -> None:
        """Keeps a finished cell; it is on disk when this returns."""
        self._rows[_make_key(cell)] = UnseenRow.from_result(cell, result)
        self._rows = dict(sorted(self._rows.items()))
        frame = pd.DataFrame([astuple(row) for row in self._rows.values()], columns=_NAMES)
        draft = self.path.with_name(f"{self.path.name}.part")
        frame.to_csv(draft, index=False, lineterminator="\n")
        draft.replace(self.path)

    @property
    def versions(self) -> set[str]:
        """The commits that the rows are of."""
        return {row.version for row in self._rows.values()}

    @property
    def rows(self) -> list[UnseenRow]:
        """All rows, sorted."""
        return list(self._rows.values())


_NAMES = [field.name for field in fields(UnseenRow)]


def _read_rows(path: Path) -> list[UnseenRow]:
    try:
        frame = pd.read_csv(path, dtype={"version": str})  # 5e95655 is a commit, not a number
    except ValueError as error:
        raise ConfigError(f"{path} is no table of unseen cells: {error}") from None
    if list(frame.columns) != _NAMES:
        raise ConfigError(f"{path} is no table of unseen cells: its columns are not {', '.join(_NAMES)}")
    return [UnseenRow(*values) for values in frame.itertuples(index=False)]


def _make_key(cell: Cell) -> tuple[int, int, str]:
    return cell.seed, cell.index, cell.policy


def _shorten(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
