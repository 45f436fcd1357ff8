"""The table of docs/metrics.md lists all metrics that the code exports."""

from __future__ import annotations

from pathlib import Path

import pytest
from lib.docs.metrics import fill_metrics, list_metrics

from tridentserve.errors import ConfigError

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_table_lists_all_metrics() -> None:
    assert fill_metrics(TEXT, ROOT) == TEXT, "the page is out of date; run python scripts/write_docs.py"
    rows = [line for line in TEXT.splitlines() if line.startswith("| `ray_tridentserve_")]
    assert len(rows) == len(list_metrics(ROOT))


def test_a_stale_table_is_replaced() -> None:
    stale = TEXT.replace("| `ray_tridentserve_queue_length` | gauge |", "| `ray_tridentserve_queue` | counter |")
    assert stale != TEXT
    assert fill_metrics(stale, ROOT) == TEXT


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ConfigError, match="add these marks"):
        fill_metrics(TEXT.replace("<!-- table: end -->", ""), ROOT)


def test_every_metric_has_the_prefix_and_a_sentence() -> None:
    found = list_metrics(ROOT)
    assert len(found) > 20
    assert all(one.name.startswith("tridentserve_") and one.meaning.endswith(".") for one in found)
    assert len({one.name for one in found}) == len(found)
