#!/usr/bin/env python3
"""Writes the modelled rows of the shipped L20 table anew, from the published rows in it and the stated figures.

Run it after a change of profiler/l20/figures.py or profiler/l20/model.py; it leaves published times as they are.
"""

from __future__ import annotations

from pathlib import Path

from lib.command_line import Parser

from profiler import read_table, write_table
from profiler.l20 import model as l20_model

_TABLE = Path(__file__).parents[1] / "profiler" / "data" / "l20.csv"


def main() -> None:
    parser = Parser(prog="make_l20_table", description=__doc__)
    parser.add_argument(
        "--table",
        type=Path,
        default=_TABLE,
        metavar="CSV",
        help=f"the table to complete (default: {_TABLE.name}, as shipped)",
    )
    path = parser.parse_args().table
    table = l20_model.complete(read_table(path).rows, path.name)
    write_table(path, table)
    print(f"{path}: {len(table.rows)} rows")


if __name__ == "__main__":
    main()
