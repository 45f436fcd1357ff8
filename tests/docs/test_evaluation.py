"""docs/evaluation.md lists the options that its tables are made with, and its tables are those of the cells with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from lib.docs.evaluation import CELLS, fill_evaluation
from lib.evaluate.kept_table import read_rows
from lib.evaluate.unseen_cells.cell_table import UnseenRow

from tridentserve.errors import ConfigError

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")


def test_the_page_is_as_the_code_and_the_cells_say() -> None:
    assert fill_evaluation(TEXT, ROOT) == TEXT, "the page is out of date; run python scripts/write_docs.py"
    assert "`dispatch.objective.horizon` 0.25;" in TEXT.replace("\n", " ")


def test_stale_options_are_replaced() -> None:
    stale = TEXT.replace("`dispatch.max_batch` 1;", "`dispatch.max_batch` 8;")
    assert stale != TEXT
    assert fill_evaluation(stale, ROOT) == TEXT


def test_the_cells_are_whole_and_each_policy_is_of_one_version() -> None:
    rows = read_rows(ROOT / CELLS, UnseenRow)
    policies = {row.policy for row in rows}
    assert len(rows) == len(policies) * len({(row.seed, row.index) for row in rows})
    assert len({(row.policy, row.version) for row in rows}) == len(policies)


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ConfigError, match="add these marks"):
        fill_evaluation(TEXT.replace("<!-- unseen: end -->", ""), ROOT)
