"""Judge the default model: ask for pictures that it was never trained on, read them back, and compare.

MODEL is a model folder, which diffusers' own pipeline loads in this process; with --url it is the name of a model of
that running service. Prints the share of things in the right color and in the right shape,
of pictures with the right number of things, the right background, and the right relation; and one JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, make_positive
from lib.judge.asking import JudgedPrompt, PictureSampling, ask_pipeline, ask_service, draw_questions
from lib.judge.reading import read_picture
from lib.judge.scoring import average, score_picture
from PIL import Image
from tqdm import tqdm


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--url", help="of a running service, such as http://127.0.0.1:8000")
    parser.add_argument("--prompts", type=make_positive(int), default=200)
    parser.add_argument("--sides", type=make_positive(int), nargs="+", default=[128, 256], help="in pixels")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts and of the noise")
    parser.add_argument("--steps", type=make_positive(int), help="default: the model's own")
    parser.add_argument("--guidance-scale", type=float, help="default: the model's own")
    parser.add_argument("--clients", type=make_positive(int), default=8, help="requests at a time, with --url")
    parser.add_argument("--images", type=Path, metavar="DIR", help="keep the pictures here")
    parser.add_quick(prompts=2, sides=[64], steps=2)
    arguments = parser.parse_args()
    settings = PictureSampling(arguments.steps, arguments.guidance_scale)
    run = describe_run(libraries=("torch", "diffusers"))
    figures = {}
    for side in arguments.sides:
        questions = draw_questions(arguments.prompts, side, arguments.seed)
        pictures = ask(arguments.model, arguments.url, questions, settings, arguments.clients)
        scores = []
        for question, picture in zip(tqdm(questions, desc=f"{side}x{side}"), pictures, strict=True):
            scores.append(score_picture(question.scene, read_picture(picture)))
            if arguments.images is not None:
                keep(picture, question, arguments.images)
        figures[f"side_{side}"] = average(scores)
        print(f"{side}x{side}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures[f"side_{side}"].items()))
    print_result(run, figures)


def ask(
    model: str, url: str | None, questions: list[JudgedPrompt], settings: PictureSampling, clients: int
) -> Iterator[np.ndarray]:
    """Have the pictures made, as 8-bit RGB of shape (side, side, 3)."""
    if url is not None:
        return ask_service(url.rstrip("/"), model, questions, settings, clients)
    return ask_pipeline(Path(model), questions, settings)


def keep(picture: np.ndarray, question: JudgedPrompt, directory: Path) -> None:
    """Write a picture whose file name is its prompt."""
    directory.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(directory / f"{question.side}-{question.seed} {question.prompt}.png")


if __name__ == "__main__":
    try:
        main()
    except (OSError, httpx.HTTPError) as error:
        sys.exit(f"judge: {error}")
