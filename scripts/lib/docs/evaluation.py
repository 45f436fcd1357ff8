"""The tables of docs/evaluation.md and docs/comparisons.md that are made from the cells beside them, and the options of
simulated services. All prose is the pages' own."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path

from deployments.assembly.options import ServiceOptions, describe_options
from lib.evaluate.kept.kept_table import read_rows
from lib.evaluate.named_cells import NamedRow, compare_named
from lib.evaluate.tables import Table
from lib.evaluate.unseen_cells.cell_table import UnseenRow
from lib.evaluate.unseen_cells.comparison import compare_unseen, sum_up_unseen
from lib.evaluate.unseen_cells.deviations import make_deviations_table
from tridentserve.engine.options import WorkerOptions
from tridentserve.engine.simulated import SimulationOptions
from tridentserve.errors import ConfigError

CELLS = "docs/evaluation/cells.csv"
DEVIATION_CELLS = "docs/evaluation/deviation-cells.csv"
PAPER_CELLS = "docs/evaluation/paper-cells.csv"
# The policies that the page compares; leads are those of the first one.
_POLICIES = ("default", "segments", "b4", "b6", "tetriserve", "tridentserve-paper")
_WIDTH = 120


def fill_evaluation(page: str, root: Path) -> str:
    """The page of the result, with the tables of the cells below `root`. Raises `ConfigError` if it has no marks."""
    tables = sum_up_unseen(read_rows(root / CELLS, UnseenRow), _POLICIES)
    return _fill(page, "result", "\n".join(table.to_markdown(level=2) for table in tables))


def fill_comparisons(page: str, root: Path) -> str:
    """The page of details with the options of a simulation of the default policy, and with all tables of the unseen
    cells, the deviations and the paper's cells below `root`. Raises `ConfigError` if it has no marks around one."""
    unseen = compare_unseen(read_rows(root / CELLS, UnseenRow), _POLICIES)
    deviations = make_deviations_table(read_rows(root / DEVIATION_CELLS, UnseenRow))
    papers = compare_named(read_rows(root / PAPER_CELLS, NamedRow))
    for name, tables in (("unseen", unseen), ("deviations", [deviations]), ("paper", papers)):
        page = _fill(page, name, _join(tables))
    return _fill(page, "options", _list_options())


def _list_options() -> str:
    options = describe_options(ServiceOptions(worker=WorkerOptions(torch_device="cuda")), SimulationOptions())
    listed = "; ".join(f"`{name}` {json.dumps(value)}" for name, value in options.items())
    return "\n".join(textwrap.wrap(f"{listed}.", _WIDTH, break_long_words=False, break_on_hyphens=False)) + "\n"


def _join(tables: Iterable[Table]) -> str:
    return "\n".join(table.to_markdown(level=3) for table in tables)


def _fill(page: str, name: str, text: str) -> str:
    start_mark, end_mark = f"<!-- {name}: start -->\n", f"<!-- {name}: end -->\n"
    before, start, rest = page.partition(start_mark)
    _, end, after = rest.partition(end_mark)
    if not start or not end:
        raise ConfigError(f"the page has nothing between {start_mark!r} and {end_mark!r}; add these marks")
    return before + start + text + end + after
