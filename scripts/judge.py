"""Judge the default models: ask for pictures, or with --video for clips, that they were never trained on, read them
back, and compare.

MODEL is a model folder, which diffusers' own pipeline loads in this process; with --url it is the name of a model of
that running service. Prints the share of things in the right color and in the right shape, of pictures with the right
number of things, the right background, and the right relation, and of the things of clips that move where they
should; and one JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, make_positive
from lib.judge.asking import JudgedPrompt, PictureSampling
from lib.judge.judgement import CLIPS, PICTURES
from lib.judge.scoring import average
from PIL import Image
from tqdm import tqdm

from tridentserve.errors import TridentServeError


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--url", help="of a running service, such as http://127.0.0.1:8000")
    parser.add_argument("--prompts", type=make_positive(int), default=200)
    parser.add_argument("--video", action="store_true", help="MODEL makes videos")
    parser.add_argument(
        "--sides",
        type=make_positive(int),
        nargs="+",
        help="in pixels; default: all sizes of the quality figures in docs/default-model.md",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts and of the noise")
    parser.add_argument("--steps", type=make_positive(int), help="default: the model's own")
    parser.add_argument("--guidance-scale", type=float, help="default: the model's own")
    parser.add_argument("--clients", type=make_positive(int), default=8, help="requests at a time, with --url")
    parser.add_argument("--images", type=Path, metavar="DIR", help="keep the pictures here")
    parser.add_quick(prompts=2, sides=[64], steps=2)
    arguments = parser.parse_args()
    settings = PictureSampling(arguments.steps, arguments.guidance_scale)
    run = describe_run(libraries=("torch", "diffusers"))
    judgement = CLIPS if arguments.video else PICTURES
    figures = {}
    for side in arguments.sides or judgement.sides:
        questions = judgement.draw(arguments.prompts, side, arguments.seed)
        if arguments.url is not None:
            url = arguments.url.rstrip("/")
            answers = judgement.request(url, arguments.model, questions, settings, arguments.clients)
            made: Iterator[np.ndarray] = (shown for shown, _ in answers)
        else:
            made = judgement.ask_pipeline(Path(arguments.model), questions, settings)
        scores = []
        for question, shown in zip(tqdm(questions, desc=f"{side}x{side}"), made, strict=True):
            scores.append(judgement.score(question.scene, shown))
            if arguments.images is not None:
                keep(shown, question, arguments.images)
        figures[f"side_{side}"] = average(scores)
        print(f"{side}x{side}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures[f"side_{side}"].items()))
    print_result(run, figures)


def keep(shown: np.ndarray, question: JudgedPrompt[object], directory: Path) -> None:
    """Write a picture, or every fourth frame of a clip in a row, to a file whose name is its prompt."""
    directory.mkdir(parents=True, exist_ok=True)
    picture = shown if shown.ndim == 3 else np.concatenate(list(shown[::4]), 1)
    Image.fromarray(picture).save(directory / f"{question.side}-{question.seed} {question.prompt}.png")


if __name__ == "__main__":
    try:
        main()
    except (OSError, httpx.HTTPError, TridentServeError) as error:
        sys.exit(f"judge: {error}")
