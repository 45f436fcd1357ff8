"""docs/evaluation.md lists the options that its tables are made with."""

from __future__ import annotations

from pathlib import Path

import pytest
from lib.docs.configuration import fill_options

from tridentserve.errors import ConfigError

TEXT = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")


def test_the_options_are_those_of_the_code() -> None:
    assert fill_options(TEXT) == TEXT, "the page is out of date; run python scripts/write_docs.py"
    assert "`dispatch.objective.horizon` 0.25;" in TEXT.replace("\n", " ")


def test_stale_options_are_replaced() -> None:
    stale = TEXT.replace("`dispatch.max_batch` 1;", "`dispatch.max_batch` 8;")
    assert stale != TEXT
    assert fill_options(stale) == TEXT


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ConfigError, match="add these marks"):
        fill_options(TEXT.replace("<!-- options: end -->", ""))
