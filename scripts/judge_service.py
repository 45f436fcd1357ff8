#!/usr/bin/env python3
"""Judges a default model through services that run its requests in different ways, beside diffusers' own pipeline.

Each way has a service of four whole workers of its own: at degrees 1, 2 and 4 of sequence parallelism, in batches,
and stopped and moved between workers (TetriServe). The same prompts, which were never trained on, go to all of them
with the same seeds. Printed are the judge's figures, how the requests really ran, and by how much their pixels differ
from the stock pipeline's. With --video it is the video model, and the stock pipeline's clips pass through the service's
encoder before they are compared. The last line is one JSON object.
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
from lib.judge.asking import JudgedPrompt, PictureSampling
from lib.judge.judgement import CLIPS, PICTURES, Judgement
from lib.judge.scoring import average
from lib.judge.ways import SERVING_WAYS, ServingWay, make_way_args, summarize_timelines, write_profile
from lib.local_service import add_serve_url, deploy, run_local_serve
from tqdm import tqdm

from deployments.config.file import read_args
from tridentserve.errors import TridentServeError
from tridentserve.models.model_folder import find_shipped_model

_QUICKSTART = Path(__file__).parent.parent / "deployments" / "quickstart.yaml"
_WAYS = {way.name.replace(" ", "-"): way for way in SERVING_WAYS}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse_arguments(argv)
    judgement = CLIPS if options.video else PICTURES
    args = read_args(_QUICKSTART)
    defaults = next(model.defaults for model in args.models if model.name == judgement.model)
    side: int = options.side or judgement.sides[0]
    steps: int = options.steps or defaults.num_inference_steps or 1
    settings = PictureSampling(steps, defaults.guidance_scale)
    questions = judgement.draw(options.prompts, side, options.seed)
    shape = {"width": side, "height": side, "num_frames": judgement.frames}
    load = {"model": judgement.model, **shape, "num_inference_steps": steps}
    run = describe_run(libraries=("ray", "torch", "diffusers"))
    rows: list[dict[str, Any]] = []
    try:
        made = judgement.ask_pipeline(find_shipped_model(judgement.model), questions, settings)
        stock = [judgement.store(shown) for shown in tqdm(made, "stock", len(questions))]
        rows.append({"way": "stock", "scores": _judge(judgement, questions, stock)})
        with tempfile.TemporaryDirectory() as directory, run_local_serve(options.serve_url) as url:
            profile = Path(directory) / "ways.csv"
            write_profile(profile, judgement.model)
            for name in options.ways:
                with deploy(make_way_args(args, _WAYS[name], profile, load)):
                    rows.append(_try_way(url, judgement, _WAYS[name], questions, settings, stock))
    except (TridentServeError, OSError, httpx.HTTPError) as error:
        print(f"judge_service: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for row in rows:
        print(f"{row['way']:<12}" + "".join(f" {name} {value:.3f}" for name, value in row["scores"].items()))
    print_result(run, {"prompts": len(questions), "side": side, "rows": rows})
    return 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=make_positive(int), default=200)
    parser.add_argument("--video", action="store_true", help="the video model")
    parser.add_argument(
        "--side",
        type=make_positive(int),
        help="width and height in pixels; default: the smallest of those in docs/default-model.md",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts and of the noise")
    parser.add_argument("--steps", type=make_positive(int), help="default: the model's own")
    parser.add_argument("--ways", nargs="+", choices=list(_WAYS), default=list(_WAYS), help="only these")
    add_serve_url(parser)
    parser.add_quick(prompts=3, side=64, steps=2, ways=["degree-2"])
    return parser.parse_args(argv)


def _try_way(
    url: str,
    judgement: Judgement,
    way: ServingWay,
    questions: Sequence[JudgedPrompt[Any]],
    settings: PictureSampling,
    stock: Sequence[np.ndarray],
) -> dict[str, Any]:
    """One row: the figures of a way, and how its requests ran."""
    answers = judgement.request(url, judgement.model, questions, settings, way.clients)
    answered = list(tqdm(answers, way.name, len(questions)))
    made = [shown for shown, _ in answered]
    differences = [np.abs(a.astype(int) - b.astype(int)) for a, b in zip(made, stock, strict=True)]
    return {
        "way": way.name,
        "scores": _judge(judgement, questions, made),
        **asdict(summarize_timelines([facts["timeline"] for _, facts in answered])),
        "equal_pictures": sum(not difference.any() for difference in differences),
        "max_difference": max(int(difference.max()) for difference in differences),
    }


def _judge(
    judgement: Judgement, questions: Sequence[JudgedPrompt[Any]], made: Sequence[np.ndarray]
) -> dict[str, float]:
    return average([judgement.score(q.scene, shown) for q, shown in zip(questions, made, strict=True)])


if __name__ == "__main__":
    sys.exit(main())
