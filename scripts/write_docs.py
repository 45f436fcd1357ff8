"""Writes the tables of docs/configuration.md anew, from the models of the configuration.

Example: python scripts/write_docs.py
Exit status: 0; 1 with --check when the page is not as the code says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lib.command_line import Parser
from lib.docs.configuration import with_tables

from tridentserve.errors import TridentServeError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="write_docs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and say whether the page is up to date")
    check = parser.parse_args(argv).check
    try:
        text = PAGE.read_text(encoding="utf-8")
        wanted = with_tables(text)
        if check and text != wanted:
            print(f"write_docs: {PAGE} is out of date; run python scripts/write_docs.py", file=sys.stderr)
            return 1
        if not check:
            PAGE.write_text(wanted, encoding="utf-8")
    except (TridentServeError, OSError) as error:
        print(f"write_docs: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
