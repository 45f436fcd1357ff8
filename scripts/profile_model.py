#!/usr/bin/env python3
"""Measures the stages of a model on this machine and writes the profile table that planning uses.

MODEL is a folder saved by diffusers, or tiny-sd3 or tiny-flux for the tiny random-weight pipelines; several models go
into one table. Writes OUT and, beside it, the weights of each stage (NAME.weights.csv). See docs/planning.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from profiler.measure import MeasureOptions, Point, measure, points
from profiler.measure_stages import Sample, Source
from profiler.tables import ProfileTable, write_table
from tridentserve.errors import TridentServeError
from tridentserve.families import FAMILIES
from tridentserve.pipelines import ensure_tiny
from tridentserve.requests import Shape

_TINY = {f"tiny-{family}": family for family in FAMILIES}


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _degrees(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _shapes(text: str) -> list[Shape]:
    """`512` is a square, `768x512` is 768 wide and 512 high."""
    shapes = []
    for part in text.split(","):
        width, _, height = part.partition("x")
        shapes.append(Shape(height=_positive(height or width), width=_positive(width)))
    return shapes


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="model folder, tiny-sd3 or tiny-flux")
    parser.add_argument("--out", type=Path, required=True, metavar="CSV", help="the table to write")
    parser.add_argument("--sizes", type=_shapes, default=_shapes("128,256,512,1024"), help="such as 256,768x512")
    parser.add_argument("--degrees", type=_degrees, default=[1, 2, 4], help="of sequence parallelism (default 1,2,4)")
    parser.add_argument("--steps-per-point", type=_positive, default=10, metavar="N", help="timed runs (default 10)")
    parser.add_argument("--passes", type=_positive, default=1, metavar="N", help="times over; the lowest count (1)")
    parser.add_argument("--name", help="model name in the table (default: the folder's name); one MODEL only")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--threads", type=_positive, default=1, metavar="N", help="torch threads of one worker (1)")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "tridentserve", metavar="DIR")
    arguments = parser.parse_args(argv)
    if arguments.name and len(arguments.models) > 1:
        parser.error("--name is for one MODEL only")
    return arguments


def _profile(model: str, arguments: argparse.Namespace) -> ProfileTable:
    folder = ensure_tiny(_TINY[model], arguments.cache_dir) if model in _TINY else Path(model)
    name = arguments.name or (model if model in _TINY else folder.resolve().name)
    options = MeasureOptions(arguments.steps_per_point, arguments.passes, arguments.threads)
    total = len(points(arguments.sizes, arguments.degrees)) * arguments.passes
    with tqdm(total=total, desc=name, unit="point") as bar:

        def on_point(point: Point, sample: Sample) -> None:
            stage, shape, degree = point
            bar.set_postfix_str(f"{stage} {shape} degree {degree}: {1000 * sample.seconds:.1f} ms")
            bar.update()

        source = Source(folder, arguments.device, arguments.dtype)
        return measure(source, name, arguments.sizes, arguments.degrees, options, on_point)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the table was written, 1 when a model cannot be measured as asked (the message says why)."""
    arguments = _arguments(argv)
    try:
        tables = [_profile(model, arguments) for model in arguments.models]
    except TridentServeError as error:
        print(f"profile_model: {error}", file=sys.stderr)
        return 1
    rows = tuple(row for table in tables for row in table.rows)
    weights = tuple(row for table in tables for row in table.weights)
    write_table(arguments.out, ProfileTable(arguments.out.name, rows, weights))
    print(f"{arguments.out}: {len(rows)} points of {', '.join(table.name for table in tables)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
