#!/usr/bin/env python3
"""Check a Ray Serve config file: one line per problem, exit status 1 when there is any.

Example: python scripts/check_config.py deployments/quickstart.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

from lib.command_line import Parser

from deployments.validation.serve_file import check_config


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the YAML file that `serve run` would get")
    problems = check_config(parser.parse_args().file)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
