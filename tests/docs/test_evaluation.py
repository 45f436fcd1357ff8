"""docs/comparisons.md lists the options that its tables are made with, and the tables of cells on it and on
docs/evaluation.md are those of the cells with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lib.docs.evaluation import CELLS, PAPER_CELLS, fill_comparisons, fill_evaluation
from lib.evaluate.kept.kept_table import read_rows
from lib.evaluate.named_cells import NamedRow
from lib.evaluate.unseen_cells.cell_table import UnseenRow

from tridentserve.errors import ConfigError

ROOT = Path(__file__).parents[2]
Fill = Callable[[str, Path], str]


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "fill"), [("evaluation.md", fill_evaluation), ("comparisons.md", fill_comparisons)])
def test_the_pages_are_as_the_code_and_the_cells_say(name: str, fill: Fill) -> None:
    assert fill(read(name), ROOT) == read(name), "the page is out of date; run python scripts/write_docs.py"


def test_stale_options_are_replaced() -> None:
    text = read("comparisons.md")
    assert "`dispatch.objective.horizon` 0.25;" in text.replace("\n", " ")
    stale = text.replace("`dispatch.max_batch` 1;", "`dispatch.max_batch` 8;")
    assert stale != text
    assert fill_comparisons(stale, ROOT) == text


def test_the_cells_are_whole_and_each_policy_is_of_one_version() -> None:
    rows = read_rows(ROOT / CELLS, UnseenRow)
    policies = {row.policy for row in rows}
    assert len(rows) == len(policies) * len({(row.seed, row.index) for row in rows})
    assert len({(row.policy, row.version) for row in rows}) == len(policies)


def test_each_load_of_the_papers_cells_has_every_policy_in_every_cell() -> None:
    rows = read_rows(ROOT / PAPER_CELLS, NamedRow)
    policies = {row.policy for row in rows}
    assert {"default", "tridentserve-paper", "b6", "b6-planned"} <= policies
    assert len(rows) == len(policies) * len({replace(row, policy="").key for row in rows})
    assert len({(row.policy, row.version) for row in rows}) == len(policies)


@pytest.mark.parametrize(
    ("name", "fill", "mark"),
    [
        ("evaluation.md", fill_evaluation, "result"),
        ("comparisons.md", fill_comparisons, "unseen"),
        ("comparisons.md", fill_comparisons, "deviations"),
        ("comparisons.md", fill_comparisons, "paper"),
    ],
)
def test_a_page_without_marks_is_refused(name: str, fill: Fill, mark: str) -> None:
    with pytest.raises(ConfigError, match="add these marks"):
        fill(read(name).replace(f"<!-- {mark}: end -->", ""), ROOT)
