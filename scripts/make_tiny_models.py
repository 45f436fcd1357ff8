"""Make the tiny random-weight pipelines and print their folders, one per line."""

from __future__ import annotations

import argparse
from pathlib import Path

from tridentserve.families import FAMILIES
from tridentserve.pipelines import ensure_tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "tridentserve", metavar="DIR")
    arguments = parser.parse_args()
    for family in FAMILIES:
        print(ensure_tiny(family, arguments.cache_dir))


if __name__ == "__main__":
    main()
