"""Denoising steps on one worker: the gain of leaving out work within them, and of sharing them among sizes.

Each prompt is made in all qualities, one after another, and compared with the exact one of the same prompt, also by a
small SDXL, which decides patch by patch. Requests of three sizes are denoised one after another, as one packed sequence
and padded, and by a U-Net as patches, by turns; on several workers, on a ring each and padded on one ring. Mixes that
were never measured are predicted. Simulated services say where the dispatcher packs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lib.benchmark import describe_run, print_result
from lib.command_line import PROFILES, Parser, make_positive, parse_mix, parse_sides, parse_whole_number
from lib.steps.border_ways import measure_borders
from lib.steps.packed_mixes import measure_mix
from lib.steps.packed_prediction import measure_predictions
from lib.steps.packed_service import simulate_mix
from lib.steps.qualities import PROMPTS, QUALITIES, compare_qualities, make_all
from lib.steps.ring_mixes import make_model_for_rings, measure_rings
from lib.steps.small_unet import make_small_sdxl

from tridentserve.errors import TridentServeError
from tridentserve.models.model_folder import find_shipped_model
from tridentserve.pipelines import PipelineAdapter, load_adapter
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.stages import Stage


def main() -> int:
    options = _parse_arguments()
    torch.set_num_threads(options.threads)
    run = describe_run(libraries=("torch", "diffusers"))
    adapter = load_adapter(options.model or find_shipped_model("shapes"), frozenset(Stage))
    with tempfile.TemporaryDirectory() as folder:
        unet = load_adapter(make_small_sdxl(Path(folder) / "sdxl"), frozenset(Stage))
        rows = _measure_caches(adapter, options.sides, options.steps, options)
        rows += _measure_caches(unet, options.unet_sides, options.unet_steps, options)
        mixes = _measure_mixes(adapter, options.mixes, options) + _measure_mixes(unet, options.unet_mixes, options)
    predictions = _measure_predictions(adapter, options)
    rings = _measure_rings(options)
    borders = _measure_borders(options)
    figures = {name: getattr(options, name) for name in ("steps", "unet_steps", "prompts", "mix_steps")}
    print_result(
        run,
        figures
        | {
            "caches": rows,
            "mixes": mixes,
            "predictions": predictions,
            "rings": rings,
            "borders": borders,
            "services": _simulate_services(options),
        },
    )
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder of a family that makes images; default: `shapes`")
    parser.add_argument("--sides", type=parse_whole_number, nargs="*", default=[128, 256], help="in pixels")
    parser.add_argument("--steps", type=parse_whole_number, default=28, help="denoising steps of each request")
    parser.add_argument("--guidance-scale", type=make_positive(float), default=4.0)
    parser.add_argument("--prompts", type=parse_whole_number, default=len(PROMPTS), help="requests per row")
    parser.add_argument(
        "--unet-sides",
        type=parse_whole_number,
        nargs="*",
        default=[128, 256],
        help="qualities of a small SDXL, in pixels",
    )
    parser.add_argument("--unet-steps", type=parse_whole_number, default=50, help="denoising steps of each of these")
    parser.add_argument("--threads", type=parse_whole_number, default=1, help="of the CPU")
    _add_mix_options(parser)
    _add_part_options(parser)
    parser.add_quick(
        sides=[64],
        steps=6,
        prompts=1,
        mixes=[[32, 48, 64]],
        unet_mixes=[[64, 128]],
        unet_sides=[64],
        unet_steps=20,
        predicted_mixes=2,
        prediction_sides=[32, 48, 64],
        ring_mixes=[[32, 64]],
        ring_workers=2,
        border_channels=[64],
        border_side=8,
        mix_steps=1,
        rounds=1,
        requests=20,
    )
    return parser.parse_args()


def _add_mix_options(parser: Parser) -> None:
    """Add the options of requests of several sizes that run together."""
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
    parser.add_argument("--predicted-mixes", type=int, default=40, help="random mixes of `--prediction-sides`")
    parser.add_argument(
        "--prediction-sides", type=parse_whole_number, nargs="*", default=[64, 96, 128, 192, 256], help="in pixels"
    )
    parser.add_argument("--mix-steps", type=parse_whole_number, default=8, help="denoising steps of requests of a mix")
    parser.add_argument("--rounds", type=parse_whole_number, default=7, help="measured rounds of each mix")


def _add_part_options(parser: Parser) -> None:
    """Add the options of what is measured beside single workers: rings of them, borders of patches, whole services."""
    parser.add_argument(
        "--ring-mixes",
        type=parse_mix,
        nargs="*",
        default=[[64, 64, 64, 256], [64, 128, 192, 256], [128, 128, 256, 256]],
        help="of requests on several workers, in pixels",
    )
    parser.add_argument("--ring-workers", type=parse_whole_number, default=4, help="a power of two")
    parser.add_argument(
        "--border-channels",
        type=parse_whole_number,
        nargs="*",
        default=[64, 128, 256, 320],
        help="of convolutions, multiples of 32",
    )
    parser.add_argument("--border-side", type=parse_whole_number, default=16, help="of their patches, in latent pixels")
    parser.add_argument(
        "--service-mixes",
        type=parse_sides,
        nargs="*",
        default=[[128, 256, 512], [512, 1024, 1536]],
        help="of requests to simulated services, in pixels",
    )
    parser.add_argument("--requests", type=parse_whole_number, default=300, help="of each simulated service")
    parser.add_argument("--profiles", default=PROFILES, help="a profile table that comes with TridentServe")


def _measure_caches(
    adapter: PipelineAdapter, sides: Sequence[int], steps: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for side in sides:
        made = [make_all(adapter, side, number, steps, options.guidance_scale) for number in range(options.prompts)]
        rows += [{"family": adapter.family} | compare_qualities(side, quality, made) for quality in QUALITIES]
    return _tell(
        rows,
        lambda row: (
            f"{row['family']} {row['side']:5} {row['quality']:6} skipped {row['skipped']:.2f}, time "
            f"{row['time_ratio']:.2f} of exact ({row['seconds']:.2f} s), PSNR {row['psnr_db']:.1f} dB, SSIM "
            f"{row['ssim']:.3f}"
        ),
    )


def _measure_mixes(
    adapter: PipelineAdapter, mixes: Sequence[Sequence[int]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for sides in mixes:
        rows += measure_mix(
            cast(DiffusersAdapter, adapter), sides, options.mix_steps, options.guidance_scale, options.rounds
        )
    return _tell(
        rows,
        lambda row: (
            f"{row['family']} {row['sides']} {row['way']:6} {row['requests_per_s']:.2f} requests/s, latency "
            f"{row['mean_latency_s']:.3f} s, time {row['time_ratio']:.2f} of one by one, difference "
            f"{row['max_difference']:.1e}"
        ),
    )


def _measure_predictions(adapter: PipelineAdapter, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    if options.predicted_mixes:
        rows.append(
            measure_predictions(
                cast(DiffusersAdapter, adapter),
                options.prediction_sides,
                options.predicted_mixes,
                options.guidance_scale,
                options.rounds,
                seed=1,
            )
        )
    return _tell(
        rows,
        lambda row: (
            f"{row['family']} {row['sides']}: {row['predicted']} mixes predicted from {row['measured']} batches, error "
            f"{row['mean_error']:.3f} in the mean, {row['worst_error']:.3f} at worst"
        ),
    )


def _measure_rings(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    if options.ring_mixes:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model_for_rings(Path(folder) / "model")
            rows = measure_rings(model, options.ring_mixes, options.ring_workers, options.rounds)
    return _tell(
        rows,
        lambda row: (
            f"{row['sides']} on {row['workers']} workers: {row['step_s']:.2f} s a step, {row['time_over_padded']:.2f} "
            f"of padding, {row['sent_bytes'] / 1e6:.1f} MB sent, {row['sent_over_padded']:.2f} of padding"
        ),
    )


def _measure_borders(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = [measure_borders(channels, options.border_side, options.rounds) for channels in options.border_channels]
    return _tell(
        rows,
        lambda row: (
            f"group norm, borders and convolution of {row['channels']} channels: time {row['fused_ratio']:.2f} where "
            f"the first two are one, convolution {row['convolution_share']:.2f} of all"
        ),
    )


def _tell(rows: list[dict[str, Any]], describe: Callable[[dict[str, Any]], str]) -> list[dict[str, Any]]:
    """Print a line for each row. Returns the rows."""
    for row in rows:
        print(describe(row))
    return rows


def _simulate_services(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for sides in options.service_mixes:
        rows += simulate_mix(options.profiles, sides, options.requests, seed=1)
    return _tell(
        rows,
        lambda row: (
            f"simulated {row['sides']} {row['way']:7} {row['mixed_plans']} of {row['plans']} plans mixed, "
            f"{row['on_time']:.2f} on time, latency {row['mean_latency_s']:.1f} s, all done after {row['end_s']:.0f} s"
        ),
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, TridentServeError) as error:
        sys.exit(f"bench_step: {error}")
