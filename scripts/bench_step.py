"""Denoising steps on one worker: the gain of leaving out work within them, and of sharing them among sizes.

Each prompt is made in all qualities, one after another, and compared with the exact one of the same prompt. Requests of
three sizes are denoised one after another, as one packed sequence and padded, and by a U-Net as patches, by turns.
Simulated services say where the dispatcher packs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lib.benchmark import describe_run, print_result
from lib.command_line import PROFILES, Parser, make_positive, parse_sides, parse_whole_number
from lib.compare.packed_mixes import measure_mix
from lib.compare.packed_service import simulate_mix
from lib.compare.small_unet import make_small_sdxl
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from tridentserve.errors import TridentServeError
from tridentserve.models.model_folder import find_shipped_model
from tridentserve.pipelines import PipelineAdapter, load_adapter
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.base import SKIPPED_STEPS
from tridentserve.requests import GenerationInputs, Quality, Shape
from tridentserve.stages import Stage

_PROMPTS = (
    "a red circle above a blue square",
    "two small yellow stars on a gray background",
    "a large green heart on the left",
    "three orange triangles",
    "a purple cross to the right of a black circle",
    "a pink star in the top left corner on a dark green background",
)
# Wang et al., Image Quality Assessment: From Error Visibility to Structural Similarity (2004).
_SIGMA, _BRIGHTNESS, _CONTRAST = 1.5, (0.01 * 255) ** 2, (0.03 * 255) ** 2

_QUALITIES: tuple[Quality, ...] = ("exact", "high", "fast")


@dataclass(frozen=True, slots=True)
class _Made:
    """One request, made alone."""

    seconds: float
    """Time of all its denoising steps."""
    skipped: float
    """Share of its steps that took over what others had found."""
    pixels: NDArray[np.uint8]


def main() -> int:
    options = _parse_arguments()
    torch.set_num_threads(options.threads)
    run = describe_run(libraries=("torch", "diffusers"))
    adapter = load_adapter(options.model or find_shipped_model("shapes"), frozenset(Stage))
    rows = []
    for side in options.sides:
        made = [_make_all(adapter, options, side, number) for number in range(options.prompts)]
        rows += [_compare(side, quality, made) for quality in _QUALITIES]
    for row in rows:
        print(
            f"{row['side']:5} {row['quality']:6} skipped {row['skipped']:.2f}, time {row['time_ratio']:.2f} of exact"
            f" ({row['seconds']:.2f} s), PSNR {row['psnr_db']:.1f} dB, SSIM {row['ssim']:.3f}"
        )
    mixes = _measure_mixes(adapter, options.mixes, options) + _measure_unet_mixes(options)
    figures = {"steps": options.steps, "prompts": options.prompts, "mix_steps": options.mix_steps}
    print_result(run, figures | {"caches": rows, "mixes": mixes, "services": _simulate_services(options)})
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder of a family that makes images; default: `shapes`")
    parser.add_argument("--sides", type=parse_whole_number, nargs="*", default=[128, 256], help="in pixels")
    parser.add_argument("--steps", type=parse_whole_number, default=28, help="denoising steps of each request")
    parser.add_argument("--guidance-scale", type=make_positive(float), default=4.0)
    parser.add_argument("--prompts", type=parse_whole_number, default=len(_PROMPTS), help="requests per row")
    parser.add_argument(
        "--mixes", type=parse_sides, nargs="*", default=[[32, 48, 64], [64, 96, 128], [128, 192, 256]], help="in pixels"
    )
    parser.add_argument(
        "--unet-mixes",
        type=parse_sides,
        nargs="*",
        default=[[64, 128, 192], [128, 192, 256], [256, 384, 512]],
        help="of a small SDXL, in pixels",
    )
    parser.add_argument("--mix-steps", type=parse_whole_number, default=8, help="denoising steps of requests of a mix")
    parser.add_argument("--rounds", type=parse_whole_number, default=7, help="measured rounds of each mix")
    parser.add_argument(
        "--service-mixes",
        type=parse_sides,
        nargs="*",
        default=[[128, 256, 512], [512, 1024, 1536]],
        help="of requests to simulated services, in pixels",
    )
    parser.add_argument("--requests", type=parse_whole_number, default=300, help="of each simulated service")
    parser.add_argument("--profiles", default=PROFILES, help="a profile table that comes with TridentServe")
    parser.add_argument("--threads", type=parse_whole_number, default=1, help="of the CPU")
    parser.add_quick(
        sides=[64], steps=6, prompts=1, mixes=[[32, 48, 64]], unet_mixes=[[64, 128]], mix_steps=1, rounds=1, requests=20
    )
    return parser.parse_args()


def _measure_unet_mixes(options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        adapter = load_adapter(make_small_sdxl(Path(folder) / "sdxl"), frozenset(Stage))
        return _measure_mixes(adapter, options.unet_mixes, options)


def _measure_mixes(
    adapter: PipelineAdapter, mixes: Sequence[Sequence[int]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for sides in mixes:
        rows += measure_mix(
            cast(DiffusersAdapter, adapter), sides, options.mix_steps, options.guidance_scale, options.rounds
        )
    for row in rows:
        print(
            f"{row['family']} {row['sides']} {row['way']:6} {row['requests_per_s']:.2f} requests/s, latency "
            f"{row['mean_latency_s']:.3f} s, time {row['time_ratio']:.2f} of one by one, difference "
            f"{row['max_difference']:.1e}"
        )
    return rows


def _simulate_services(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for sides in options.service_mixes:
        rows += simulate_mix(options.profiles, sides, options.requests, seed=1)
    for row in rows:
        print(
            f"simulated {row['sides']} {row['way']:7} {row['mixed_plans']} of {row['plans']} plans mixed, "
            f"{row['on_time']:.2f} on time, latency {row['mean_latency_s']:.1f} s, all done after {row['end_s']:.0f} s"
        )
    return rows


def _make_all(adapter: PipelineAdapter, options: argparse.Namespace, side: int, number: int) -> dict[Quality, _Made]:
    made: dict[Quality, _Made] = {}
    for quality in _QUALITIES:
        inputs = GenerationInputs(
            _PROMPTS[number % len(_PROMPTS)],
            Shape(side, side),
            options.steps,
            options.guidance_scale,
            seed=number,
            quality=quality,
        )
        state = adapter.prepare(adapter.encode(inputs), inputs)
        began_s = time.perf_counter()
        while state.step < state.num_steps:
            state = adapter.step(state)
        seconds = time.perf_counter() - began_s
        pixels = adapter.decode(adapter.latents(state), inputs)
        made[quality] = _Made(seconds, state.values[SKIPPED_STEPS] / state.num_steps, pixels)
    return made


def _compare(side: int, quality: Quality, made: list[dict[Quality, _Made]]) -> dict[str, Any]:
    ones, exact = [each[quality] for each in made], [each["exact"] for each in made]
    pairs = list(zip(ones, exact, strict=True))
    return {
        "side": side,
        "quality": quality,
        "skipped": statistics.mean(one.skipped for one in ones),
        "seconds": statistics.median(one.seconds for one in ones),
        "time_ratio": statistics.median(one.seconds / whole.seconds for one, whole in pairs),
        "psnr_db": statistics.mean(measure_psnr(one.pixels, whole.pixels) for one, whole in pairs),
        "ssim": statistics.mean(measure_ssim(one.pixels, whole.pixels) for one, whole in pairs),
    }


def measure_psnr(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio in decibels; infinity where all values are equal."""
    error = np.square(one.astype(np.float64) - other).mean()
    return float(10 * np.log10(255**2 / error)) if error else float("inf")


def measure_ssim(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Mean structural similarity of pictures (..., height, width, channels), at most 1."""
    pair = np.stack([one, other]).astype(np.float64)
    sigma = (0.0,) * (pair.ndim - 3) + (_SIGMA, _SIGMA, 0.0)
    means = gaussian_filter(pair, sigma, truncate=3.5)
    variances = gaussian_filter(np.square(pair), sigma, truncate=3.5) - np.square(means)
    covariance = gaussian_filter(pair[0] * pair[1], sigma[1:], truncate=3.5) - means[0] * means[1]
    like = (2 * means[0] * means[1] + _BRIGHTNESS) * (2 * covariance + _CONTRAST)
    return float((like / ((np.square(means).sum(0) + _BRIGHTNESS) * (variances.sum(0) + _CONTRAST))).mean())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, TridentServeError) as error:
        sys.exit(f"bench_step: {error}")
