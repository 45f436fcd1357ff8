"""Latency of the service over the stock diffusers pipeline in one process: one request at a time, degree 1.

Both run the same tiny model, size, steps and number of threads on this machine, in turn, in one run. The service is a
whole one: HTTP, Api, Scheduler, one worker, PNG and base64 of the answer; the stock pipeline ends with a PIL image.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import diffusers
import httpx
import numpy as np
import torch
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, parse_whole_number
from lib.local_service import run_local_service
from PIL import Image

from deployments.config.app import AppArgs
from deployments.validation.args import check_args
from tridentserve.pipelines.tiny.build import ensure_tiny

_PROMPT, _SEED = "a lighthouse at dawn", 7
# The name of the model in a service that the benchmark starts.
_MODEL = "model"
_PIPELINES = {"sd3": diffusers.StableDiffusion3Pipeline, "flux": diffusers.FluxPipeline}


def main() -> int:
    options, args = _parse_arguments()
    run = describe_run(f"threads {options.threads}", libraries=("ray", "torch", "diffusers"))
    torch.set_num_threads(options.threads)
    stock = _load_stock_pipeline(options.family, args.cache_dir)
    with nullcontext(options.url) if options.url else run_local_service(args) as url:
        pairs = [_measure_pair(stock, url, options) for _ in range(1 + options.runs)][1:]
    _report(run, pairs, options)
    return 0


def _parse_arguments() -> tuple[argparse.Namespace, AppArgs]:
    """The options, and the configuration they make: one model, whose only size is the one asked for."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=sorted(_PIPELINES), default="sd3")
    parser.add_argument("--side", type=parse_whole_number, default=256, help="width and height in pixels")
    parser.add_argument("--steps", type=parse_whole_number, default=50)
    parser.add_argument(
        "--runs", type=parse_whole_number, default=7, help="pairs that are counted, after one that is not"
    )
    parser.add_argument(
        "--threads", type=parse_whole_number, default=1, help="torch threads of worker and stock pipeline"
    )
    parser.add_argument("--url", help="a service that runs already; without it one is started")
    parser.add_argument("--model", default=_MODEL, help="name of the tiny model of this family in the service at --url")
    parser.add_quick(side=64, steps=2, runs=1)
    options = parser.parse_args()
    if options.model != _MODEL and options.url is None:
        parser.error("--model is for a service that runs already: give its --url too")
    limits = {"min_side": options.side, "max_side": options.side, "max_pixels": options.side**2}
    model = {"name": _MODEL, "tiny": options.family, "profile_as": f"tiny-{options.family}"}
    args = {
        "models": [{**model, "limits": {**limits, "max_steps": options.steps}}],
        "cluster": {"workers_per_node": 1, "memory_mb": 1024, "cpu_threads": options.threads},
        "placement": ["EDC"],
    }
    if problems := check_args(args):
        parser.error("\n".join(problems))
    return options, AppArgs.model_validate(args)


def _load_stock_pipeline(family: str, cache_dir: Path) -> Any:
    pipeline = _PIPELINES[family].from_pretrained(ensure_tiny(family, cache_dir), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _measure_pair(stock: Any, url: str, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of the stock pipeline and of the service for the same image, which must be equal."""
    began_s = time.perf_counter()
    expected = stock(
        prompt=_PROMPT,
        width=options.side,
        height=options.side,
        num_inference_steps=options.steps,
        guidance_scale=5.0,
        generator=torch.Generator("cpu").manual_seed(_SEED),
    ).images[0]
    between_s = time.perf_counter()
    body = {
        "model": options.model,
        "prompt": _PROMPT,
        "size": f"{options.side}x{options.side}",
        "num_inference_steps": options.steps,
        "guidance_scale": 5.0,
        "seed": _SEED,
    }
    # Not through a proxy of the environment: the service is on this machine.
    answer = httpx.post(f"{url}/v1/images/generations", json=body, timeout=600.0, trust_env=False)
    ended_s = time.perf_counter()
    answer.raise_for_status()
    got = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
    if not np.array_equal(np.asarray(got), np.asarray(expected)):
        raise SystemExit("the service's image is not the stock pipeline's")
    return between_s - began_s, ended_s - between_s


def _report(run: dict[str, str], pairs: list[tuple[float, float]], options: argparse.Namespace) -> None:
    stock_s, service_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = [service / stock for stock, service in pairs]
    print(f"stock pipeline: median {stock_s:.3f} s; service: median {service_s:.3f} s; {options.runs} pairs")
    print(f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    result = {
        "family": options.family,
        "side": options.side,
        "steps": options.steps,
        "runs": options.runs,
        "stock_s": round(stock_s, 4),
        "service_s": round(service_s, 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
    }
    print_result(run, result)


if __name__ == "__main__":
    sys.exit(main())
