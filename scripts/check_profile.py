#!/usr/bin/env python3
"""Measures sizes that a profile table was not measured at, and compares them with what the table predicts for them.

TABLE is a CSV file, such as the one that a service has written for a model without a profile. MODEL is a model folder
or tiny-FAMILY, and has the name --name in the table. Prints a line per stage and size, and one JSON object at the end.

Exit status: 0 when all errors are at most --most, 1 when one is larger, or on a failure, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lib.command_line import Parser
from lib.measure.models import (
    add_model_options,
    add_passes_option,
    check_model_options,
    choose_name,
    make_source,
    parse_shapes,
)

from profiler import CostModel, read_table
from profiler.measure.checks import Sweep
from profiler.measure.run import MeasureOptions, find_device_name, measure
from tridentserve.errors import TridentServeError


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="check_profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="TABLE", help="the table to check")
    parser.add_argument("model", metavar="MODEL", help="model folder, tiny-FAMILY or published model")
    parser.add_argument("--name", help="model name in the table (default: the model folder's name)")
    parser.add_argument(
        "--device-name", metavar="NAME", help="name of the device in the table (default: cpu, or what CUDA says)"
    )
    parser.add_argument("--sizes", type=parse_shapes, required=True, help="sizes, such as 96,160x256")
    add_passes_option(parser)
    parser.add_argument(
        "--most", type=float, default=25.0, metavar="PERCENT", help="largest allowed error (default %(default)s)"
    )
    add_model_options(parser)
    arguments = parser.parse_args(argv)
    check_model_options(parser, [arguments.model], arguments)
    return arguments


def _compare(arguments: argparse.Namespace, scratch: Path) -> float:
    """The largest relative error in percent. Prints all. Raises `ProfileError` for a size that the table does not
    cover."""
    source = make_source(arguments.model, arguments, scratch)
    name = arguments.name or choose_name(arguments.model, arguments)
    times = CostModel([read_table(arguments.table)], arguments.device_name or find_device_name(source.device))
    options = MeasureOptions(passes=arguments.passes, num_threads=arguments.threads)
    rows = measure(source, name, Sweep(arguments.sizes), options).rows
    errors = {}
    for row in rows:
        predicted_s = times.seconds(name, row.stage, row.shape)
        error = errors[f"{row.stage} {row.shape}"] = 100 * (predicted_s / row.seconds - 1)
        print(
            f"{row.stage} {row.shape}: predicted {1000 * predicted_s:.1f} ms, measured {1000 * row.seconds:.1f} ms, "
            f"{error:+.1f} %"
        )
    worst = max(map(abs, errors.values()))
    rounded = {point: round(error, 1) for point, error in errors.items()}
    print(json.dumps({"errors_percent": rounded, "worst_percent": round(worst, 1)}))
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    with tempfile.TemporaryDirectory(prefix="check-profile-") as scratch:
        try:
            return 0 if _compare(arguments, Path(scratch)) <= arguments.most else 1
        except (TridentServeError, OSError, MemoryError, RuntimeError) as error:
            print(f"check_profile: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
