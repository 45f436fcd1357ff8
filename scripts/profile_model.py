#!/usr/bin/env python3
"""Measures the stages of a model on this machine and writes the profile table that planning uses.

MODEL is a model folder saved by diffusers, tiny-sd3, tiny-flux, ... for the tiny random-weight pipelines, or with
--random-weights the name of a published model (flux.1-dev), which is then made in full size without its files.
Several models go into one table. Writes OUT and, next to it, the weights of each stage (NAME.weights.csv), both anew
after every point. See docs/planning.md.

Exit status: 0 when everything was measured, 1 when it had to stop (OUT has what was measured until then), 2 for bad
usage, 3 when OUT can be used but lacks points that were skipped (stderr says which and why), 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lib.command_line import Parser, parse_whole_number
from lib.measure.models import (
    add_model_options,
    add_passes_option,
    check_model_options,
    choose_name,
    make_source,
    parse_shapes,
)
from tqdm import tqdm

from profiler.cost_model import CostModel
from profiler.measure.checks import ProfilePoint, Sweep, check_measurable
from profiler.measure.run import MeasureOptions, find_device_name, measure
from profiler.measure.stages import Sample, Source
from profiler.tables.rows import ProfileRow, ProfileTable, derive_weights_path, read_table, write_table
from tridentserve.errors import TridentServeError
from tridentserve.models.kernels import ATTENTIONS, Kernels
from tridentserve.stages import Stage


def _parse_degrees(text: str) -> list[int]:
    degrees = _parse_counts(text)
    if any(degree & (degree - 1) for degree in degrees):
        raise argparse.ArgumentTypeError(f"{text!r} must be powers of two, with 1 among them: plans need degree 1")
    return degrees


def _parse_counts(text: str) -> list[int]:
    """Numbers with 1 among them, which planning starts from."""
    counts = sorted({parse_whole_number(part) for part in text.split(",")})
    if counts[0] != 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers with 1 among them: planning starts from it")
    return counts


def _parse_batches(text: str) -> list[int] | None:
    return None if text == "auto" else _parse_counts(text)


def _parse_stages(text: str) -> list[Stage]:
    try:
        return [Stage(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be some of {','.join(Stage)}") from None


def _parse_table_path(text: str) -> Path:
    """A path at which the table can be written; checked now, as measuring may take hours."""
    path = Path(text)
    if path.suffix != ".csv":
        raise argparse.ArgumentTypeError(f"{text!r} must end in .csv")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"the directory of {text!r} cannot be made ({error.strerror})") from None
    for file in (path, derive_weights_path(path)):
        if file.is_dir():
            raise argparse.ArgumentTypeError(f"{str(file)!r} is a directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"nothing can be written into {str(path.parent)!r}")
    return path


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="profile_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="model folder, tiny-FAMILY or published model")
    parser.add_argument("--model", action="append", default=[], metavar="MODEL", help="the same, as an option")
    parser.add_argument("--out", type=_parse_table_path, required=True, metavar="CSV", help="the table to write")
    parser.add_argument("--resume", action="store_true", help="keep what OUT has already and measure the rest")
    parser.add_argument(
        "--sizes",
        type=parse_shapes,
        default=parse_shapes("128,256,512,1024"),
        help="sizes, such as 256,768x512,832x480x81 (frames)",
    )
    parser.add_argument(
        "--degrees", type=_parse_degrees, default="1,2,4", help="degrees of sequence parallelism (default %(default)s)"
    )
    parser.add_argument(
        "--decode-degrees", type=_parse_degrees, default="1", help="degrees of decode (default %(default)s)"
    )
    parser.add_argument(
        "--batches",
        type=_parse_batches,
        default="auto",
        help="batch sizes, such as 1,2,4; auto (the default) doubles a batch, up to 8, for as long as it takes less "
        "than a fifth longer than one",
    )
    parser.add_argument(
        "--stages", type=_parse_stages, default=list(Stage), help="stages to measure, of encode,diffuse,decode"
    )
    parser.add_argument(
        "--steps-per-point",
        type=parse_whole_number,
        default=MeasureOptions().repeats,
        metavar="N",
        help="timed runs of each point (default %(default)s)",
    )
    add_passes_option(parser)
    parser.add_argument("--name", help="model name in the table (default: the model folder's name); one MODEL only")
    parser.add_argument(
        "--attention", choices=ATTENTIONS, default=Kernels().attention, help="attention kernel (default: torch chooses)"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the blocks of the denoising model")
    add_model_options(parser)
    arguments = parser.parse_args(argv)
    arguments.models += arguments.model
    if not arguments.models:
        parser.error("name at least one MODEL")
    check_model_options(parser, arguments.models, arguments)
    if arguments.name is not None and len(arguments.models) > 1:
        parser.error("--name is for one MODEL only")
    for name, times in Counter(_choose_name(model, arguments) for model in arguments.models).items():
        if times > 1:
            parser.error(f"two MODELs would be named {name!r} in the table; measure one of them into another table")
        if not name or not name.isprintable() or name != name.strip():
            parser.error(f"{name!r} cannot name a model in the table; choose a --name of printable characters")
    return arguments


def _choose_name(model: str, arguments: argparse.Namespace) -> str:
    given: str | None = arguments.name
    return choose_name(model, arguments) if given is None else given


def _make_sweep(arguments: argparse.Namespace) -> Sweep:
    return Sweep(arguments.sizes, arguments.degrees, arguments.batches, arguments.stages, arguments.decode_degrees)


@dataclass
class _Output:
    """The table that grows with every point, on disk too. `known`: what it had when we began; of other models, and
    of this one under other names of devices, it is kept as it is."""

    path: Path
    known: ProfileTable | None = None
    finished: list[ProfileTable] = field(default_factory=list)
    num_points: int = 0
    num_skipped: int = 0

    def write(self, growing: ProfileTable) -> None:
        tables = [*([self.known] if self.known else []), *self.finished, growing]
        rows = {row.key: row for table in tables for row in table.rows}
        weights = {(row.model, row.stage): row for table in tables for row in table.weights}
        write_table(self.path, ProfileTable(self.path.name, tuple(rows.values()), tuple(weights.values())))
        self.num_points = len(rows)


def _profile(name: str, source: Source, arguments: argparse.Namespace, output: _Output) -> None:
    """Measure one model. Raises `ProfileError` when what could be measured of it is not enough to plan with."""
    options, sweep = (
        MeasureOptions(arguments.steps_per_point, arguments.passes, arguments.threads),
        _make_sweep(arguments),
    )
    done = {(row.stage, row.shape, row.degree, row.batch) for row in _list_known_rows(output.known, name, source)}
    left = [at for at in sweep.list_points() if (at.stage, at.shape, at.degree, at.batch) not in done]
    with tqdm(total=len(left) * arguments.passes, desc=name, unit="point") as bar:

        def on_point(point: ProfilePoint, sample: Sample, table: ProfileTable) -> None:
            output.write(table)
            bar.set_postfix_str(f"{point}: {1000 * sample.seconds:.1f} ms")
            if bar.n == bar.total:  # larger batches, whose number is not known before
                bar.total += 1
            bar.update()

        def on_skip(point: ProfilePoint, reason: str) -> None:
            output.num_skipped += 1
            bar.write(f"profile_model: skipped {name} {point}: {reason}", file=sys.stderr)
            bar.update()

        table = measure(source, name, sweep, options, on_point, on_skip, output.known)
    output.write(table)
    output.finished.append(table)
    if set(arguments.stages) == set(Stage):
        CostModel([table], find_device_name(source.device))


def _list_known_rows(known: ProfileTable | None, name: str, source: Source) -> list[ProfileRow]:
    device = find_device_name(source.device)
    return [row for row in known.rows if (row.model, row.gpu) == (name, device)] if known else []


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    output = _Output(arguments.out)
    status = 2  # until something is measured, whatever is wrong is wrong usage
    with tempfile.TemporaryDirectory(prefix="profile-model-") as scratch:
        try:
            if arguments.resume and arguments.out.exists():
                output.known = read_table(arguments.out)
            kernels = Kernels(arguments.attention, arguments.compile)
            sources = {
                _choose_name(model, arguments): make_source(model, arguments, Path(scratch), kernels)
                for model in arguments.models
            }
            for source in sources.values():
                check_measurable(source, _make_sweep(arguments))
            status = 1
            for name, source in sources.items():
                _profile(name, source, arguments, output)
            status = 3 if output.num_skipped else 0
        except (TridentServeError, OSError, MemoryError, torch.OutOfMemoryError) as error:
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
