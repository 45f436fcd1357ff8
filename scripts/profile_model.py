#!/usr/bin/env python3
"""Measures the stages of a model on this machine and writes the profile table that planning uses.

MODEL is a folder saved by diffusers, or tiny-sd3 or tiny-flux for the tiny random-weight pipelines; several models go
into one table. Writes OUT and, beside it, the weights of each stage (NAME.weights.csv), both anew after every point.
See docs/planning.md.

Exit status: 0 when everything was measured, 1 when it had to stop (OUT has what was measured until then), 2 for bad
usage, 3 when OUT can be used but lacks points that were skipped (stderr says which and why), 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from command_line import Parser, whole_number
from tqdm import tqdm

from profiler.cost_model import CostModel
from profiler.measure import MeasureOptions, Point, check_measurable, device_name, measure, points
from profiler.measure_stages import Sample, Source
from profiler.tables import ProfileTable, weights_path, write_table
from tridentserve.cache import cache_dir
from tridentserve.errors import TridentServeError
from tridentserve.families import FAMILIES
from tridentserve.pipelines import ensure_tiny
from tridentserve.requests import Shape

_TINY = {f"tiny-{family}": family for family in FAMILIES}
_MAX_SIDE = 65536


def _degrees(text: str) -> list[int]:
    degrees = sorted({whole_number(part) for part in text.split(",")})
    if degrees[0] != 1 or any(degree & (degree - 1) for degree in degrees):
        raise argparse.ArgumentTypeError(f"{text!r} must be powers of two, with 1 among them: plans need degree 1")
    return degrees


def _shapes(text: str) -> list[Shape]:
    """`512` is a square, `768x512` is 768 wide and 512 high."""
    shapes = []
    for part in text.split(","):
        width, by, height = part.partition("x")
        shapes.append(Shape(height=whole_number(height if by else width), width=whole_number(width)))
        if max(shapes[-1].height, shapes[-1].width) > _MAX_SIDE:
            raise argparse.ArgumentTypeError(f"{part} has a side above {_MAX_SIDE}")
    return list(dict.fromkeys(shapes))


def _table_path(text: str) -> Path:
    """Where the table can be written; found out now, as measuring may take hours."""
    path = Path(text)
    if path.suffix != ".csv":
        raise argparse.ArgumentTypeError(f"{text!r} must end in .csv")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"the folder of {text!r} cannot be made ({error.strerror})") from None
    for file in (path, weights_path(path)):
        if file.is_dir():
            raise argparse.ArgumentTypeError(f"{str(file)!r} is a folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"nothing can be written into {str(path.parent)!r}")
    return path


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="profile_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="model folder, tiny-sd3 or tiny-flux")
    parser.add_argument("--out", type=_table_path, required=True, metavar="CSV", help="the table to write")
    parser.add_argument("--sizes", type=_shapes, default=_shapes("128,256,512,1024"), help="such as 256,768x512")
    parser.add_argument("--degrees", type=_degrees, default=[1, 2, 4], help="of sequence parallelism (default 1,2,4)")
    parser.add_argument("--steps-per-point", type=whole_number, default=10, metavar="N", help="timed runs (default 10)")
    parser.add_argument("--passes", type=whole_number, default=1, metavar="N", help="times over; the lowest count (1)")
    parser.add_argument("--name", help="model name in the table (default: the folder's name); one MODEL only")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--threads", type=whole_number, default=1, metavar="N", help="torch threads of one worker (1)")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="of the tiny models ($TRIDENTSERVE_CACHE or ~/.cache/tridentserve)",
    )
    arguments = parser.parse_args(argv)
    if arguments.name is not None and len(arguments.models) > 1:
        parser.error("--name is for one MODEL only")
    for name, times in Counter(_name(model, arguments) for model in arguments.models).items():
        if times > 1:
            parser.error(f"two MODELs would be named {name!r} in the table; measure one of them into another table")
        if not name or not name.isprintable() or name != name.strip():
            parser.error(f"{name!r} cannot name a model in the table; choose a --name of printable characters")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    return arguments


def _name(model: str, arguments: argparse.Namespace) -> str:
    given: str | None = arguments.name
    if given is not None:
        return given
    return model if model in _TINY else Path(model).resolve().name


def _source(model: str, arguments: argparse.Namespace) -> Source:
    folder = ensure_tiny(_TINY[model], arguments.cache_dir or cache_dir()) if model in _TINY else Path(model)
    return Source(folder, arguments.device, arguments.dtype)


@dataclass
class _Output:
    """The table that grows with every point, on disk too."""

    path: Path
    finished: list[ProfileTable] = field(default_factory=list)
    num_points: int = 0
    num_skipped: int = 0

    def write(self, growing: ProfileTable) -> ProfileTable:
        tables = [*self.finished, growing]
        rows = tuple(row for table in tables for row in table.rows)
        whole = ProfileTable(self.path.name, rows, tuple(row for table in tables for row in table.weights))
        write_table(self.path, whole)
        self.num_points = len(rows)
        return whole


def _profile(name: str, source: Source, arguments: argparse.Namespace, output: _Output) -> None:
    """Measure one model. Raises `ProfileError` when what could be measured of it is not enough to plan with."""
    options = MeasureOptions(arguments.steps_per_point, arguments.passes, arguments.threads)
    total = len(points(arguments.sizes, arguments.degrees)) * arguments.passes
    with tqdm(total=total, desc=name, unit="point") as bar:

        def on_point(point: Point, sample: Sample, table: ProfileTable) -> None:
            stage, shape, degree = point
            output.write(table)
            bar.set_postfix_str(f"{stage} {shape} degree {degree}: {1000 * sample.seconds:.1f} ms")
            bar.update()

        def on_skip(point: Point, reason: str) -> None:
            stage, shape, degree = point
            output.num_skipped += 1
            bar.write(f"profile_model: skipped {name} {stage} {shape} degree {degree}: {reason}", file=sys.stderr)
            bar.update()

        table = measure(source, name, arguments.sizes, arguments.degrees, options, on_point, on_skip)
    output.finished.append(table)
    CostModel([table], device_name(source.device))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    output = _Output(arguments.out)
    status = 1
    try:
        sources = {_name(model, arguments): _source(model, arguments) for model in arguments.models}
        for source in sources.values():
            check_measurable(source, arguments.sizes, arguments.degrees)
        for name, source in sources.items():
            _profile(name, source, arguments, output)
        status = 3 if output.num_skipped else 0
    except (TridentServeError, OSError, torch.OutOfMemoryError) as error:
        print(f"profile_model: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("profile_model: interrupted", file=sys.stderr)
        status = 130
    if output.num_points:
        skipped = f"; {output.num_skipped} were skipped" if output.num_skipped else ""
        print(f"{arguments.out}: {output.num_points} points of {', '.join(sources)}{skipped}")
    return status


if __name__ == "__main__":
    sys.exit(main())
