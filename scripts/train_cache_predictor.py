#!/usr/bin/env python3
"""Trains the predictor with which `quality: high` and `fast` of an SDXL model decide where results are used again.

Makes exact images with MODEL, a model folder, and compares what enters and leaves its transformer blocks from step to
step. The predictor goes to MODEL/reuse_predictor.json, where services find it, or to --out. Without MODEL it is trained
on a small SDXL of random weights, as the one that comes with TridentServe was. Every fifth run is not trained on, but
judged. The last line is one JSON object.

Example: python scripts/train_cache_predictor.py ~/models/sdxl --device cuda --sides 512 1024 --runs 40
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, make_positive, parse_whole_number
from lib.steps.qualities import PROMPTS, QUALITIES
from lib.steps.reuse_training import Samples, fit, judge, record_run
from lib.steps.small_unet import make_small_sdxl

from tridentserve.errors import ModelFolderError, TridentServeError
from tridentserve.models.step_cache import StepCache
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.adapters.sdxl import SDXLAdapter
from tridentserve.pipelines.reuse.patch_pass import install_reuse
from tridentserve.pipelines.reuse.predictor import FEATURES, FILE_NAME, write_predictor
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

# Every so many runs one is judged.
_HELD_OUT = 5


def main() -> int:
    options = _parse_arguments()
    torch.set_num_threads(options.threads)
    run = describe_run(libraries=("torch", "diffusers"))
    with tempfile.TemporaryDirectory() as folder:
        runs = _record_runs(options.model or make_small_sdxl(Path(folder) / "sdxl"), options)
    judged = runs[_HELD_OUT - 1 :: _HELD_OUT] or runs
    trained = [each for index, each in enumerate(runs) if index % _HELD_OUT != _HELD_OUT - 1]
    predictor = fit(np.concatenate(trained), options.seed)
    limits = StepCache()
    decisions = [
        {"quality": quality, **judge(predictor, np.concatenate(judged), limit)}
        for quality in QUALITIES[1:]
        for limit in [limits.find_patch_limit(quality)]
    ]
    for row in decisions:
        print(
            f"{row['quality']}: {row['right']:.3f} of the decisions right, {row['reused']:.3f} to use results again, "
            f"{row['wrongly_reused']:.3f} of these where they had changed by more than {row['limit']}"
        )
    about = {
        "command": run["command"],
        "date": datetime.now(UTC).date().isoformat(),
        "seed": options.seed,
        "model": "a small SDXL of random weights" if options.model is None else options.model.name,
        "judged": decisions,
    }
    write_predictor(options.out, predictor.weights, about)
    print(f"written: {options.out}")
    figures: dict[str, Any] = {
        "runs": len(runs),
        "comparisons": sum(map(len, runs)),
        "weights": dict(zip(FEATURES, predictor.weights, strict=True)),
        "decisions": decisions,
    }
    print_result(run, figures)
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="model folder of an SDXL")
    parser.add_argument("--out", type=Path, help=f"default: MODEL/{FILE_NAME}, without MODEL out/{FILE_NAME}")
    parser.add_argument("--sides", type=parse_whole_number, nargs="+", default=[64, 128, 192], help="in pixels")
    parser.add_argument("--steps", type=parse_whole_number, nargs="+", default=[20, 50], help="of the runs, in turn")
    parser.add_argument("--guidance-scale", type=make_positive(float), default=5.0)
    parser.add_argument("--runs", type=parse_whole_number, default=10, help="images, of all sides in turn")
    parser.add_argument("--seed", type=parse_whole_number, default=1, help="of images and of the limits trained for")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=parse_whole_number, default=1, help="of the CPU")
    parser.add_quick(sides=[64], steps=[4], runs=2)
    options = parser.parse_args()
    options.out = options.out or (options.model or Path("out")) / FILE_NAME
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return options


def _record_runs(model: Path, options: argparse.Namespace) -> list[Samples]:
    adapter = load_adapter(model, frozenset({Stage.ENCODE, Stage.DIFFUSE}), device=options.device)
    if not isinstance(adapter, SDXLAdapter):
        raise ModelFolderError(f"{model} is of the family {adapter.family}; only models of sdxl have such a predictor")
    install_reuse(adapter.pipe.unet)
    runs = []
    for number in range(options.runs):
        side = options.sides[number % len(options.sides)]
        inputs = GenerationInputs(
            PROMPTS[number % len(PROMPTS)],
            Shape(side, side),
            options.steps[number // len(options.sides) % len(options.steps)],
            options.guidance_scale,
            seed=options.seed + number,
        )
        runs.append(record_run(adapter, inputs))
        print(f"run {number + 1} of {options.runs}: {inputs.shape}, {inputs.num_inference_steps} steps", flush=True)
    return runs


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, TridentServeError) as error:
        sys.exit(f"train_cache_predictor: {error}")
