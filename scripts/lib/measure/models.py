"""The options that the profiling scripts share: the measured models, their sizes and the device."""

from __future__ import annotations

import argparse
from pathlib import Path

from lib.command_line import Parser, parse_whole_number
from profiler.measure.random_weights import write_published
from profiler.measure.run import MeasureOptions
from profiler.measure.stages import Source
from profiler.published_models import list_published_models
from tridentserve.device import find_device
from tridentserve.engine.options import WorkerOptions
from tridentserve.errors import ConfigError
from tridentserve.models.cache import cache_dir
from tridentserve.models.families import FAMILIES
from tridentserve.models.kernels import Kernels
from tridentserve.models.number_formats import FLOAT_FORMATS, NumberFormats
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import Shape

_TINY = {f"tiny-{family}": family for family in FAMILIES}
_MAX_SIDE = 65536


def parse_shapes(text: str) -> list[Shape]:
    """`512` is a square, `768x512` is 768 wide and 512 high, `768x512x49` has 49 frames."""
    found = []
    for part in text.split(","):
        width, *others = (parse_whole_number(number) for number in part.split("x"))
        if len(others) > 2:
            raise argparse.ArgumentTypeError(f"{part!r} is no size: width x height x frames are the most")
        height, frames = (*others, *(width, 1)[len(others) :])
        if max(height, width) > _MAX_SIDE:
            raise argparse.ArgumentTypeError(f"{part} has a side above {_MAX_SIDE}")
        found.append(Shape(height, width, frames))
    return list(dict.fromkeys(found))


def _parse_formats(text: str) -> NumberFormats:
    """`bfloat16` is for all stages, `E=int8,C=float32` for some."""
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        return NumberFormats.parse({letter: name for letter, _, name in pairs} if "=" in text else text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_model_options(parser: Parser) -> None:
    """All but the models themselves."""
    parser.add_argument("--random-weights", action="store_true", help="read configurations only, no weights")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device (default %(default)s)")
    parser.add_argument(
        "--dtype",
        type=_parse_formats,
        default=NumberFormats(),
        metavar="FORMAT",
        help=f"{', '.join(FLOAT_FORMATS)}, or by stage, such as E=int8,D=int8 (default: float32 on cpu, that "
        "of the model's published recipe on cuda)",
    )
    parser.add_argument(
        "--guidance-scale",
        type=float,
        metavar="SCALE",
        help="guidance scale of the requests, such as 0 or 1 for a distilled model (default: the family's)",
    )
    parser.add_argument(
        "--threads",
        type=parse_whole_number,
        default=WorkerOptions().num_threads,
        metavar="N",
        help="torch threads of one worker (default %(default)s)",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="directory of the tiny models (default: $TRIDENTSERVE_CACHE or ~/.cache/tridentserve)",
    )


def add_passes_option(parser: Parser) -> None:
    parser.add_argument(
        "--passes",
        type=parse_whole_number,
        default=MeasureOptions().passes,
        metavar="N",
        help="passes over all points; the lowest time counts (default %(default)s)",
    )


def check_model_options(parser: Parser, models: list[str], arguments: argparse.Namespace) -> None:
    """Ends the script for a model or a device that there is not."""
    for model in models:
        if model in list_published_models() and not arguments.random_weights and not Path(model).exists():
            parser.error(f"{model} is no model folder here; --random-weights makes the published model of that name")
    if find_device(arguments.device).count_devices() == 0:
        parser.error(f"--device {arguments.device}: torch finds no GPU here")


def choose_name(model: str, arguments: argparse.Namespace) -> str:
    """The name of a model in the table."""
    return model if model in _TINY or is_published(model, arguments) else Path(model).resolve().name


def is_published(model: str, arguments: argparse.Namespace) -> bool:
    """True when a model is made from its published configuration."""
    return bool(arguments.random_weights) and model in list_published_models()


def make_source(
    model: str,
    arguments: argparse.Namespace,
    scratch: Path,
    kernels: Kernels | None = None,
    most_blocks: int | None = None,
) -> Source:
    """`scratch`: the directory in which folders of published models are made, without weights, cut to `most_blocks`."""
    condition_folder = None
    if is_published(model, arguments):
        folder = write_published(model, scratch / model, most_blocks=most_blocks)
        condition_folder = write_published(model, scratch / f"{model}-few-text-layers", few_text_layers=True)
    elif model in _TINY:
        folder = ensure_tiny(_TINY[model], arguments.cache_dir or cache_dir())
    else:
        folder = Path(model)
    chosen = kernels or Kernels()
    return Source(
        folder,
        arguments.device,
        arguments.dtype,
        arguments.random_weights,
        condition_folder,
        chosen,
        guidance_scale=arguments.guidance_scale,
    )
