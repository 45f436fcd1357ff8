"""Step-level batching on one real worker: small requests with different numbers of steps, together and one by one.

Together, up to `--batch` of them share forward passes: whoever has done its steps leaves at that step boundary and is
decoded, and the next one joins. The final latents must be those of the runs alone to 1e-4, the images to 1 of 255.
Encode and decode count in the throughput. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from lib.bench.workers import Workers, run_workers
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, parse_whole_number
from lib.ray_cluster import run_ray_cluster
from numpy.typing import NDArray
from PIL import Image

from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.messages import ModelSource
from tridentserve.models.cache import cache_dir
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

MODEL, WORKER = "model", "w0"
MAX_LATENT_DIFFERENCE, MAX_PIXEL_DIFFERENCE = 1e-4, 1


@dataclass(slots=True)
class Outcome:
    """The results of all requests in one run."""

    seconds: float = 0.0
    segments: int = 0
    latents: dict[str, NDArray[Any]] = field(default_factory=dict)
    images: dict[str, NDArray[np.uint8]] = field(default_factory=dict)


def main() -> int:
    options = _parse_arguments()
    run = describe_run(libraries=("ray", "torch"))
    with run_ray_cluster(2, os.environ.get("RAY_ADDRESS")):
        pairs = asyncio.run(_measure(options))
    return _report(run, options, pairs)


def _parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="sd3", help="family of the tiny model")
    parser.add_argument("--side", type=parse_whole_number, default=64, help="width and height in pixels")
    parser.add_argument(
        "--steps",
        type=parse_whole_number,
        nargs="+",
        default=[10, 14, 18, 22, 26, 30, 34, 38],
        help="denoising steps of each request",
    )
    parser.add_argument("--batch", type=parse_whole_number, default=4, help="most requests in one batch")
    parser.add_argument(
        "--runs", type=parse_whole_number, default=5, help="pairs that are counted, after one that is not"
    )
    parser.add_quick(steps=[2, 3, 4], batch=2, runs=1)
    return parser.parse_args()


async def _measure(options: argparse.Namespace) -> list[tuple[Outcome, Outcome]]:
    inputs = {
        f"r{index}": GenerationInputs(f"number {index}", Shape(options.side, options.side), steps, 5.0, seed=index)
        for index, steps in enumerate(options.steps)
    }
    with tempfile.TemporaryDirectory() as folder:
        source = ModelSource(MODEL, ensure_tiny(options.family, cache_dir()))
        async with run_workers(1, {MODEL: source}, Path(folder)) as workers:
            pairs = [
                (await _run(workers, inputs, 1), await _run(workers, inputs, options.batch))
                for _ in range(1 + options.runs)
            ]
    return pairs[1:]


async def _run(workers: Workers, inputs: dict[str, GenerationInputs], batch: int) -> Outcome:
    """All requests with at most `batch` of them in D at once, first come first served."""
    outcome, began_s = Outcome(), time.perf_counter()
    waiting, done = list(inputs), dict.fromkeys(inputs, 0)
    members: list[str] = []
    made_by: dict[str, DispatchPlan] = {}
    while waiting or members:
        joining, waiting = waiting[: batch - len(members)], waiting[batch - len(members) :]
        if joining:
            encode = workers.make_plan(MODEL, (Stage.ENCODE,), [WORKER], [PlanMember(name) for name in joining])
            await workers.run(encode, inputs)
            made_by.update(dict.fromkeys(joining, encode))
            members += joining
        steps = min(inputs[name].num_inference_steps - done[name] for name in members)
        parts = [PlanMember(name, (done[name], done[name] + steps), made_by[name].plan_id, WORKER) for name in members]
        segment = workers.make_plan(MODEL, (Stage.DIFFUSE,), [WORKER], parts)
        await workers.run(segment, inputs)
        outcome.segments += 1
        for name in members:
            done[name] += steps
            made_by[name] = segment
        leaving = [name for name in members if done[name] == inputs[name].num_inference_steps]
        members = [name for name in members if name not in leaving]
        if leaving:
            parts = [PlanMember(name, None, segment.plan_id, WORKER) for name in leaving]
            decoded = await workers.run(workers.make_plan(MODEL, (Stage.DECODE,), [WORKER], parts), inputs)
            for name, image in zip(leaving, decoded.images, strict=True):
                outcome.images[name] = np.asarray(Image.open(io.BytesIO(image)))
    outcome.seconds = time.perf_counter() - began_s
    for name, plan in made_by.items():
        tensors = await workers.call(WORKER, "read_parcel", HandoffKey(name, plan.plan_id))
        outcome.latents[name] = np.concatenate([tensor.ravel() for tensor in tensors.values()])
    await workers.forget(list(inputs))
    return outcome


def _measure_difference(ones: dict[str, NDArray[Any]], others: dict[str, NDArray[Any]]) -> float:
    return max(float(np.abs(ones[name].astype(np.float64) - others[name]).max()) for name in ones)


def _report(run: dict[str, str], options: argparse.Namespace, pairs: list[tuple[Outcome, Outcome]]) -> int:
    ratios = [alone.seconds / together.seconds for alone, together in pairs]
    alone_s = statistics.median(alone.seconds for alone, _ in pairs)
    together_s = statistics.median(together.seconds for _, together in pairs)
    latents = max(_measure_difference(alone.latents, together.latents) for alone, together in pairs)
    pixels = max(_measure_difference(alone.images, together.images) for alone, together in pairs)
    count = len(options.steps)
    print(f"one after another: median {alone_s:.3f} s; in batches: median {together_s:.3f} s; {len(pairs)} pairs")
    print(f"throughput ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"largest difference: latents {latents:.2e}, images {pixels:.0f} of 255")
    result = {
        "requests": count,
        "steps": options.steps,
        "side": options.side,
        "batch": options.batch,
        "segments": pairs[0][1].segments,
        "alone_requests_per_s": round(count / alone_s, 3),
        "batched_requests_per_s": round(count / together_s, 3),
        "throughput_ratio": round(statistics.median(ratios), 3),
        "throughput_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "max_latent_difference": latents,
        "max_pixel_difference": pixels,
    }
    print_result(run, result)
    return 0 if latents <= MAX_LATENT_DIFFERENCE and pixels <= MAX_PIXEL_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
