"""Train the default text-to-image model, or with --video the default text-to-video model, on pictures or clips that
this script draws itself, stage by stage.

The stages are: `vae`, `latents` (pictures and captions prepared once), `denoiser` (the transformer with its text
encoders), `export` (the model folder). Each may be stopped with Ctrl-C at any moment and goes on where it was; a
stage that is complete is passed over. It uses the GPU where torch finds one, else the CPU: on two cores the VAE takes
half an hour, the transformer hours.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from lib.command_line import Parser, make_positive, parse_share
from lib.training.processes import run_processes
from lib.training.runs import DECAY_SHARE, TrainingSetup
from lib.training.stages import IMAGE_STAGES, VIDEO_STAGES

from tridentserve.device import DEVICE_CHOICES, choose_device
from tridentserve.errors import TridentServeError

STAGES = ("vae", "latents", "denoiser", "export")


def main() -> None:
    arguments = parse_arguments()
    place = choose_device(arguments.device)
    device = place.torch_device
    # Processes share the cores of a CPU; one has all of a GPU.
    processes = arguments.processes if place.is_host else 1
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    made = VIDEO_STAGES if arguments.video else IMAGE_STAGES
    folder: Path = arguments.out or Path("out") / ("default-video" if arguments.video else "default-model")
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.from_model:
        made.begin(folder, arguments.from_model, arguments.vae_steps)
    for stage in arguments.stages:
        if stage == "vae":
            run_processes(processes, made.train_vae, folder, arguments.seed, arguments.vae_steps, device)
        elif stage == "latents":
            made.prepare(folder, arguments.seed, arguments.data_scale, arguments.shard_pictures, device)
        elif stage == "denoiser":
            run_processes(processes, made.train_denoiser, folder, read_setup(arguments, device))
        else:
            target = arguments.model or folder / "model"
            made.export(folder, target)
            print(target)


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--video", action="store_true", help="the text-to-video model")
    parser.add_argument(
        "--out", type=Path, help="states, figures and samples; default: out/default-model or out/default-video"
    )
    parser.add_argument("--from-model", type=Path, help="a folder that `export` wrote: begin with its weights and VAE")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="only these, in this order")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--device",
        choices=DEVICE_CHOICES,
        default="auto",
        help="that trains; auto is the GPU where torch finds one, else the CPU (default %(default)s)",
    )
    parser.add_argument("--threads", type=make_positive(int), help="of the CPU; torch's own number if not given")
    parser.add_argument(
        "--processes",
        type=make_positive(int),
        default=1,
        help="that train together on a CPU, of a thread each; a GPU has one",
    )
    parser.add_argument("--vae-steps", type=make_positive(int), default=3500)
    parser.add_argument(
        "--data-scale", type=make_positive(float), default=1.0, help="1: 93,000 pictures or 80,000 clips"
    )
    parser.add_argument(
        "--shard-pictures", type=make_positive(int), default=1000, help="pictures or clips that a file holds"
    )
    add_transformer_options(parser)
    parser.add_argument("--model", type=Path, help="where `export` writes the model folder; default: OUT/model")
    parser.add_quick(
        vae_steps=2, data_scale=0.01, shard_pictures=2, batch_tokens=400, steps=2, reading_steps=2, grid_every=2
    )
    return parser.parse_args()


def add_transformer_options(parser: Parser) -> None:
    """Add the options of the stage `denoiser`."""
    parser.add_argument("--steps", type=make_positive(int), default=20_000, help="of the transformer")
    parser.add_argument(
        "--batch-tokens",
        type=make_positive(int),
        default=7000,
        help="of a step of the transformer, with captions",
    )
    parser.add_argument(
        "--small-share",
        type=parse_share,
        default=0.4,
        help="of the steps, the first ones, that sees small pictures or clips only (default %(default)s)",
    )
    parser.add_argument(
        "--peak-rate", type=make_positive(float), default=1.5e-3, help="the highest learning rate (default %(default)s)"
    )
    parser.add_argument(
        "--decay-share",
        type=parse_share,
        default=DECAY_SHARE,
        help="of the steps, the last ones, in which the learning rate falls to zero (default %(default)s)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the transformer, which takes a minute or two for each size and a C++ compiler; a step takes less "
        "time then",
    )
    parser.add_argument(
        "--reading-steps",
        type=make_positive(int),
        default=1500,
        help="most steps in which the text encoder of the video model learns to read captions, before the transformer "
        "is trained; it takes some hundred",
    )
    parser.add_argument("--grid-every", type=make_positive(int), default=1000, help="steps between grids of samples")


def read_setup(arguments: argparse.Namespace, device: torch.device) -> TrainingSetup:
    """The setup of the stage `denoiser`."""
    return TrainingSetup(
        device=device,
        seed=arguments.seed,
        steps=arguments.steps,
        batch_tokens=arguments.batch_tokens,
        grid_every=arguments.grid_every,
        small_share=arguments.small_share,
        peak_rate=arguments.peak_rate,
        decay_share=arguments.decay_share,
        compiles=arguments.compile,
        reading_steps=arguments.reading_steps,
    )


if __name__ == "__main__":
    try:
        main()
    except (OSError, TridentServeError) as error:
        sys.exit(f"train_default_model: {error}")
