"""Short rows of unseen cells, as docs/evaluation/cells.csv keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from lib.evaluate.cells import Cell, Settings
from lib.evaluate.kept.kept_table import KeptTable, shorten
from lib.evaluate.rows import CellResult
from tridentserve.errors import ConfigError


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
            load=shorten(parameters["load"]),
            pattern=parameters["pattern"],
            diffuse_only=parameters["diffuse_only"],
            requests=row["requests"],
            on_time=shorten(row["slo_attainment"]),
            bound=shorten(row["bound_attainment"]),
            mean_s=shorten(row["mean_all_s"]),
            p95_s=shorten(row["p95_all_s"]),
            unfinished=row["unfinished"],
            switches=row["placement_switches"],
            cut_short=row["cut_short"],
            version=row["version"],
        )

    @classmethod
    def make_key(cls, cell: Cell, settings: Settings) -> tuple[int, int, str]:
        """The cell and the policy, which a table has once."""
        return cell.seed, cell.index, cell.policy

    @property
    def key(self) -> tuple[int, int, str]:
        """The cell and the policy, which a table has once."""
        return self.seed, self.index, self.policy


def list_unseen_rows(results: Mapping[Cell, CellResult]) -> list[UnseenRow]:
    """The rows of the unseen cells among some results."""
    return [UnseenRow.from_result(cell, result) for cell, result in results.items() if cell.is_unseen]


def check_cells(table: KeptTable[UnseenRow], cells: Iterable[Cell], settings: Settings) -> None:
    """Raises `ConfigError` when the table has other cells by these numbers: with --recorded others are drawn."""
    for cell in cells:
        if (row := table.find(cell)) is not None:
            drawn = cell.draw_unseen(settings)
            if (row.gpus, row.load, row.pattern) != (drawn.gpus, shorten(drawn.load), drawn.pattern):
                raise ConfigError(
                    f"{table.path} has another cell {cell.seed}-{cell.index} than is asked for; "
                    "it was drawn with --recorded, and now without it, or the other way round"
                )
