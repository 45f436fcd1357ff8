"""Make the tiny random-weight pipelines and print their model folders, one per line.

The default place is where the service keeps them: $TRIDENTSERVE_CACHE, else ~/.cache/tridentserve.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lib.command_line import Parser

from tridentserve.errors import TridentServeError
from tridentserve.models.cache import cache_dir
from tridentserve.models.families import FAMILIES
from tridentserve.pipelines.tiny.build import ensure_tiny


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--cache-dir", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    try:
        for family in FAMILIES:
            print(ensure_tiny(family, arguments.cache_dir or cache_dir()))
    except (TridentServeError, OSError) as error:
        sys.exit(f"make_tiny_models: {error}")


if __name__ == "__main__":
    main()
