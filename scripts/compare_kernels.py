#!/usr/bin/env python3
"""Measures a denoising step by each attention kernel, with torch.compile and without, on this machine.

MODEL is as for profile_model.py. All ways share one set of weights and take turns in rounds; a ratio is of one round,
to the time of the default (`sdpa`, not compiled), and below 1 is faster. The last line is one JSON object.

Example: python scripts/compare_kernels.py sd3-medium --random-weights --blocks 2 --sizes 512

Exit status: 0; 1 when the model cannot be measured; 2 for bad usage; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, parse_whole_number
from lib.measure.models import (
    add_model_options,
    check_model_options,
    choose_name,
    is_published,
    make_source,
    parse_shapes,
)

from profiler.measure.checks import Sweep, check_measurable
from profiler.measure.kernels import Timing, compare_kernels, compute_ratios, compute_spread
from profiler.measure.run import find_device_name
from profiler.measure.stages import Source, set_up_process
from tridentserve.errors import TridentServeError
from tridentserve.models.kernels import ATTENTIONS, Attention, Kernels
from tridentserve.requests import Shape

_STOCK_PIPELINE = "diffusers"
_COLUMNS = f"{'attention':<10} {'compiled':<9} {'step s':>9} {'ratio':>7} {'lowest':>7} {'highest':>8} {'first s':>8}"


def _parse_attentions(text: str) -> list[Attention]:
    chosen = [attention for attention in ATTENTIONS if attention in text.split(",")]
    if not set(text.split(",")) <= set(ATTENTIONS):
        raise argparse.ArgumentTypeError(f"{text!r} must be some of {','.join(ATTENTIONS)}")
    return chosen


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="compare_kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model folder, tiny-FAMILY or published model")
    parser.add_argument(
        "--sizes", type=parse_shapes, default="512", help="sizes, such as 256,832x480x81 (default %(default)s)"
    )
    parser.add_argument(
        "--attention", type=_parse_attentions, default=list(ATTENTIONS), help="kernels to compare (default: all)"
    )
    parser.add_argument("--without-compile", action="store_true", help="leave torch.compile out: it takes minutes")
    parser.add_argument(
        "--stock", action="store_true", help="time the stock diffusers pipeline too, before and after the others"
    )
    parser.add_argument(
        "--rounds", type=parse_whole_number, default=7, metavar="N", help="counted rounds (default %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=parse_whole_number,
        default=1,
        metavar="N",
        help="steps of each way in a round (default %(default)s)",
    )
    parser.add_argument(
        "--blocks", type=parse_whole_number, metavar="N", help="most blocks of each kind, for a published model"
    )
    add_model_options(parser)
    parser.add_quick(
        model="tiny-sd3",
        sizes=parse_shapes("64"),
        attention=["sdpa", "math"],
        without_compile=True,
        rounds=1,
        stock=True,
    )
    arguments = parser.parse_args(argv)
    if arguments.model is None:
        parser.error("name a MODEL")
    check_model_options(parser, [arguments.model], arguments)
    if arguments.blocks is not None and not is_published(arguments.model, arguments):
        parser.error("--blocks is for published models with --random-weights")
    return arguments


def _list_ways(arguments: argparse.Namespace) -> list[Kernels]:
    both = (False,) if arguments.without_compile else (False, True)
    return [Kernels(attention, compiled) for compiled in both for attention in arguments.attention]


def _compute_figures(timings: Sequence[Timing], stock_s: Sequence[float] | None) -> list[dict[str, Any]]:
    """The figures of each way: seconds and ratios as median, lowest and highest. The stock pipeline comes last; its
    ratio is of medians, as it takes no part in the rounds."""
    first = timings[0]
    figures: list[dict[str, Any]] = [
        {"attention": timing.kernels.attention, "compiled": timing.kernels.compiled}
        | (
            {"error": timing.error}
            if timing.error
            else {
                "step_s": _round_all(compute_spread(timing.seconds)),
                "ratio": _round_all(compute_spread(compute_ratios(timing, first))),
                "first_step_s": round(timing.first_step_s, 4),
                "difference": float(f"{timing.difference:.2g}"),
                "peak_bytes": timing.peak_bytes,
            }
        )
        for timing in timings
    ]
    if stock_s is not None:
        step_s, usual_s = compute_spread(stock_s), compute_spread(first.seconds)[0]
        figures.append(
            {
                "attention": _STOCK_PIPELINE,
                "compiled": False,
                "step_s": _round_all(step_s),
                "ratio": _round_all([seconds / usual_s for seconds in step_s]),
            }
        )
    return figures


def _round_all(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _format_lines(figures: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield _COLUMNS
    for row in figures:
        name = f"{row['attention']:<10} {'yes' if row['compiled'] else 'no':<9}"
        if "error" in row:
            yield f"{name} {row['error']}"
        else:
            median, lowest, highest = row["ratio"]
            times = f"{row['step_s'][0]:>9.4f} {median:>7.3f} {lowest:>7.3f} {highest:>8.3f}"
            yield f"{name} {times} {row['first_step_s']:>8.2f}" if "first_step_s" in row else f"{name} {times}"


def _compare(arguments: argparse.Namespace, source: Source) -> dict[str, Any]:
    check_measurable(source, Sweep(arguments.sizes))
    set_up_process(arguments.threads)
    found: dict[str, Any] = {}
    stock_s: dict[Shape, list[float]] = {}
    on_stock = stock_s.__setitem__ if arguments.stock else None
    for shape, timings in compare_kernels(
        source, arguments.sizes, _list_ways(arguments), arguments.rounds, arguments.steps, on_stock
    ):
        found[str(shape)] = _compute_figures(timings, stock_s.get(shape))
        print(f"\n{_format_title(arguments, shape)}", *_format_lines(found[str(shape)]), sep="\n", flush=True)
    return found


def _format_title(arguments: argparse.Namespace, shape: Shape) -> str:
    cut = f", at most {arguments.blocks} blocks of a kind" if arguments.blocks else ""
    return f"{choose_name(arguments.model, arguments)} {shape}{cut}: {arguments.rounds} rounds of {arguments.steps}"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    details = (find_device_name(arguments.device), f"threads {arguments.threads}")
    run = describe_run(*details, libraries=("torch", "diffusers"))
    with tempfile.TemporaryDirectory(prefix="compare-kernels-") as scratch:
        try:
            source = make_source(arguments.model, arguments, Path(scratch), most_blocks=arguments.blocks)
            sizes = _compare(arguments, source)
        except (TridentServeError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            print(f"compare_kernels: {' '.join(str(error).split())}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("compare_kernels: interrupted", file=sys.stderr)
            return 130
    print_result(run, {"model": choose_name(arguments.model, arguments), "blocks": arguments.blocks, "sizes": sizes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
