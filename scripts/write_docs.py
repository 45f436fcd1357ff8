"""Writes tables and figures of the documentation anew from the code: those of docs/configuration.md and
docs/metrics.md, unseen cells of docs/evaluation.md and docs/comparisons.md, and the house figures of
docs/architecture.md.

Example: python scripts/write_docs.py
Exit status: 0; 1 with --check when a page is not as the code says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from house_figures import fill_house_figures
from lib.command_line import Parser
from lib.docs.configuration import fill_tables
from lib.docs.evaluation import fill_comparisons, fill_evaluation
from lib.docs.metrics import fill_metrics

from tridentserve.errors import TridentServeError

ROOT = Path(__file__).resolve().parents[1]
# What makes a page anew of its text.
_FILLED: dict[str, Callable[[str], str]] = {
    "configuration.md": fill_tables,
    "metrics.md": lambda page: fill_metrics(page, ROOT),
    "evaluation.md": lambda page: fill_evaluation(page, ROOT),
    "comparisons.md": lambda page: fill_comparisons(page, ROOT),
    "architecture.md": lambda page: fill_house_figures(page, ROOT),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="write_docs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and say whether the pages are up to date")
    check = parser.parse_args(argv).check
    try:
        is_stale = [write_page(name, check) for name in _FILLED]
    except (TridentServeError, OSError) as error:
        print(f"write_docs: {error}", file=sys.stderr)
        return 1
    return 1 if check and any(is_stale) else 0


def write_page(name: str, check: bool) -> bool:
    """Writes a page anew, unless `check` is set. Returns whether its tables are not as the code says."""
    path = ROOT / "docs" / name
    text = path.read_text(encoding="utf-8")
    wanted = _FILLED[name](text)
    if check and text != wanted:
        print(f"write_docs: {path} is out of date; run python scripts/write_docs.py", file=sys.stderr)
    if not check and text != wanted:
        path.write_text(wanted, encoding="utf-8")
    return text != wanted


if __name__ == "__main__":
    sys.exit(main())
