"""The tables of unseen cells in docs/evaluation.md and docs/comparisons.md, from the cells that are kept with them, and
the options of simulated services. All prose is the pages' own."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from deployments.assembly.options import ServiceOptions, describe_options
from lib.evaluate.kept_table import read_rows
from lib.evaluate.unseen_cells.cell_table import UnseenRow
from lib.evaluate.unseen_cells.comparison import compare_unseen, sum_up_unseen
from tridentserve.engine.options import WorkerOptions
from tridentserve.engine.simulated import SimulationOptions
from tridentserve.errors import ConfigError

CELLS = "docs/evaluation/cells.csv"
# The policies that the page compares; leads are those of the first one.
_POLICIES = ("default", "segments", "b4", "b6", "tetriserve", "tridentserve-paper")
_WIDTH = 120


def fill_evaluation(page: str, root: Path) -> str:
    """The page of the result, with the table of the cells below `root`. Raises `ConfigError` if it has no marks."""
    table = sum_up_unseen(read_rows(root / CELLS, UnseenRow), _POLICIES)
    return _fill(page, "result", table.to_markdown(level=2))


def fill_comparisons(page: str, root: Path) -> str:
    """The page of details with the options of a simulation of the default policy, and with all tables of the cells
    below `root`. Raises `ConfigError` if it has no marks around either."""
    return _fill(_fill(page, "options", _list_options()), "unseen", _make_tables(root))


def _list_options() -> str:
    options = describe_options(ServiceOptions(worker=WorkerOptions(torch_device="cuda")), SimulationOptions())
    listed = "; ".join(f"`{name}` {json.dumps(value)}" for name, value in options.items())
    return "\n".join(textwrap.wrap(f"{listed}.", _WIDTH, break_long_words=False, break_on_hyphens=False)) + "\n"


def _make_tables(root: Path) -> str:
    tables = compare_unseen(read_rows(root / CELLS, UnseenRow), _POLICIES)
    return "\n".join(table.to_markdown(level=3) for table in tables)


def _fill(page: str, name: str, text: str) -> str:
    start_mark, end_mark = f"<!-- {name}: start -->\n", f"<!-- {name}: end -->\n"
    before, start, rest = page.partition(start_mark)
    _, end, after = rest.partition(end_mark)
    if not start or not end:
        raise ConfigError(f"the page has nothing between {start_mark!r} and {end_mark!r}; add these marks")
    return before + start + text + end + after
