#!/usr/bin/env python3
"""Judges the default model through services that run its requests in different ways, beside diffusers' own pipeline.

Each way has a service of four whole workers of its own: at degrees 1, 2 and 4 of sequence parallelism, in batches,
and stopped and moved between workers (TetriServe). The same prompts, which were never trained on, go to all of them
with the same seeds. Printed are the judge's figures, how the requests really ran, and by how much their pixels differ
from the stock pipeline's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import numpy as np
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, make_positive
from lib.judge.asking import JudgedPrompt, PictureSampling, ask_pipeline, draw_questions, request_pictures
from lib.judge.reading import read_picture
from lib.judge.scoring import average, score_picture
from lib.judge.ways import SERVING_WAYS, ServingWay, make_way_args, summarize_timelines, write_profile
from lib.local_service import add_serve_url, deploy, run_local_serve
from tqdm import tqdm

from deployments.config.app import AppArgs
from deployments.config.file import read_args
from tridentserve.errors import TridentServeError
from tridentserve.models.model_folder import find_shipped_model

_QUICKSTART = Path(__file__).parent.parent / "deployments" / "quickstart.yaml"
_WAYS = {way.name.replace(" ", "-"): way for way in SERVING_WAYS}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse_arguments(argv)
    args = read_args(_QUICKSTART)
    defaults = args.models[0].defaults
    steps: int = options.steps or defaults.num_inference_steps or 1
    settings = PictureSampling(steps, defaults.guidance_scale)
    questions = draw_questions(options.prompts, options.side, options.seed)
    run = describe_run(libraries=("ray", "torch", "diffusers"))
    rows: list[dict[str, Any]] = []
    try:
        stock = list(tqdm(ask_pipeline(find_shipped_model("shapes"), questions, settings), "stock", len(questions)))
        rows.append({"way": "stock", "scores": _judge(questions, stock)})
        with tempfile.TemporaryDirectory() as directory, run_local_serve(options.serve_url) as url:
            profile = Path(directory) / "ways.csv"
            write_profile(profile)
            for name in options.ways:
                way_args = make_way_args(args, _WAYS[name], profile, options.side, steps)
                rows.append(_try_way(url, way_args, _WAYS[name], questions, settings, stock))
    except (TridentServeError, OSError, httpx.HTTPError) as error:
        print(f"judge_service: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for row in rows:
        print(f"{row['way']:<12}" + "".join(f" {name} {value:.3f}" for name, value in row["scores"].items()))
    print_result(run, {"prompts": len(questions), "side": options.side, "rows": rows})
    return 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=make_positive(int), default=200)
    parser.add_argument("--side", type=make_positive(int), default=128, help="width and height in pixels")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts and of the noise")
    parser.add_argument("--steps", type=make_positive(int), help="default: the model's own")
    parser.add_argument("--ways", nargs="+", choices=list(_WAYS), default=list(_WAYS), help="only these")
    add_serve_url(parser)
    parser.add_quick(prompts=3, side=64, steps=2, ways=["degree-2"])
    return parser.parse_args(argv)


def _try_way(
    url: str,
    args: AppArgs,
    way: ServingWay,
    questions: Sequence[JudgedPrompt[Any]],
    settings: PictureSampling,
    stock: Sequence[np.ndarray],
) -> dict[str, Any]:
    """One row: the figures of a way, and how its requests ran."""
    with deploy(args):
        answers = request_pictures(url, args.models[0].name, questions, settings, way.clients)
        answered = list(tqdm(answers, way.name, len(questions)))
    pictures = [picture for picture, _ in answered]
    differences = [np.abs(a.astype(int) - b.astype(int)) for a, b in zip(pictures, stock, strict=True)]
    return {
        "way": way.name,
        "scores": _judge(questions, pictures),
        **asdict(summarize_timelines([answer["timeline"] for _, answer in answered])),
        "equal_pictures": sum(not difference.any() for difference in differences),
        "max_difference": max(int(difference.max()) for difference in differences),
    }


def _judge(questions: Sequence[JudgedPrompt[Any]], pictures: Sequence[np.ndarray]) -> dict[str, float]:
    return average([score_picture(q.scene, read_picture(p)) for q, p in zip(questions, pictures, strict=True)])


if __name__ == "__main__":
    sys.exit(main())
