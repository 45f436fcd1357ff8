#!/usr/bin/env python3
"""Check a Ray Serve config file: one line per problem, exit status 1 when there is any.

Without a problem, one line per model of the hub that is not in its cache, and so was not checked, and exit status 0.

Example: python scripts/check_config.py deployments/quickstart.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

from lib.command_line import Parser

from deployments.validation.serve_file import check_config, list_unchecked


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the YAML file that `serve run` would get")
    file = parser.parse_args().file
    problems = check_config(file)
    for line in problems or [f"not checked: {line}" for line in list_unchecked(file)]:
        print(line)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
