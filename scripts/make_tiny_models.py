"""Make the tiny random-weight pipelines and print their folders, one per line.

The default place is where the service keeps them: $TRIDENTSERVE_CACHE, else ~/.cache/tridentserve.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tridentserve.families import FAMILIES
from tridentserve.pipelines import ensure_tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("TRIDENTSERVE_CACHE") or "~/.cache/tridentserve").expanduser()
    parser.add_argument("--cache-dir", type=Path, default=default, metavar="DIR")
    arguments = parser.parse_args()
    for family in FAMILIES:
        print(ensure_tiny(family, arguments.cache_dir))


if __name__ == "__main__":
    main()
