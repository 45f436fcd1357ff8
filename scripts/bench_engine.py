"""Times in which the live engine moves things on real workers (CPU processes): groups, tensors, weights, requests.

`regroup`: workers form a group. `handoff`: 64 MiB through NIXL and through Ray's object store. `load`: weights
from a peer, the host copy, the model folder. `pause_resume`: a request yields and resumes. `service_pause`: the same
with the scheduler in between. `join`: a request joins a running batch, and leaves it. `switch`: another placement under
load. `shift`: the load shifts, and the placement follows by itself. Medians; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from lib.bench.handing_off import measure_handoff
from lib.bench.joining import measure_join
from lib.bench.loading import measure_load
from lib.bench.model_folder import make_model_folder
from lib.bench.pausing import measure_pause, measure_service_pause
from lib.bench.regrouping import measure_regroup
from lib.bench.shifting import measure_shift
from lib.bench.switching import measure_switch
from lib.bench.workers import Workers, run_workers
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, make_positive, parse_whole_number
from lib.ray_cluster import run_ray_cluster

from dispatch.options import DEFAULT_POLICY
from tridentserve.engine.live.messages import ModelSource
from tridentserve.models.cache import cache_dir
from tridentserve.pipelines.tiny.build import ensure_tiny

# Room for two parcels of 64 MiB: one that leaves, one that arrives.
_HANDOFF_BYTES = 160 << 20
# The default, and the default with the placement that it begins with.
_SHIFT_POLICIES = (DEFAULT_POLICY, "wo-switch")
PARTS = ("regroup", "handoff", "load", "pause_resume", "service_pause", "join", "switch", "shift")


def main() -> int:
    options = _parse_arguments()
    run = describe_run(libraries=("ray", "torch"))
    with run_ray_cluster(4, os.environ.get("RAY_ADDRESS")), tempfile.TemporaryDirectory() as folder:
        print_result(run, asyncio.run(_measure(options, Path(folder))))
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="measure only these")
    parser.add_argument("--runs", type=parse_whole_number, default=20, help="runs of each measurement")
    parser.add_argument(
        "--layers", type=parse_whole_number, default=6, help="layers of the loaded transformer, about 40 MB each"
    )
    parser.add_argument(
        "--side", type=parse_whole_number, default=1536, help="side of the image that is paused; a step takes seconds"
    )
    parser.add_argument("--pauses", type=parse_whole_number, default=4, help="pauses of that image")
    parser.add_argument(
        "--small-side", type=parse_whole_number, default=512, help="side of an image whose steps are short"
    )
    parser.add_argument("--requests", type=parse_whole_number, default=80, help="requests during the switch")
    parser.add_argument("--gap-s", type=make_positive(float), default=0.8, help="seconds between two requests")
    parser.add_argument(
        "--keep-workers", action="store_true", help="switch there and back, instead of starting anew for each way"
    )
    parser.add_argument(
        "--shift-s", type=make_positive(float), default=12.0, help="seconds of either load when the load shifts"
    )
    parser.add_argument(
        "--shift-policies",
        choices=_SHIFT_POLICIES,
        nargs="+",
        default=list(_SHIFT_POLICIES),
        help="policies that serve this load, one after another",
    )
    parser.add_argument(
        "--overlap-s", type=make_positive(float), default=2.0, help="seconds of computation during handoffs"
    )
    parser.add_argument(
        "--group-sizes", type=parse_whole_number, nargs="+", default=[2, 4], help="members of the groups that are made"
    )
    parser.add_quick(
        runs=2,
        layers=1,
        side=64,
        pauses=1,
        small_side=64,
        requests=6,
        gap_s=0.1,
        keep_workers=True,
        shift_s=1.0,
        shift_policies=[DEFAULT_POLICY],
        overlap_s=0.1,
        group_sizes=[2],
    )
    return parser.parse_args()


async def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}

    def add(name: str, figures: dict[str, Any]) -> None:
        result[name] = figures
        print(f"{name}: {json.dumps(figures)}", flush=True)

    sources = {"tiny": ModelSource("tiny", ensure_tiny("sd3", cache_dir()))}
    if {"load", "switch"}.intersection(options.only):
        sources["large"] = ModelSource("large", make_model_folder(folder / "large", options.layers))
    if {"regroup", "handoff", "load", "pause_resume"}.intersection(options.only):
        count = max(2, *options.group_sizes)
        async with run_workers(count, sources, folder / "host", handoff_bytes=_HANDOFF_BYTES) as workers:
            await _measure_workers(workers, options, add)
    if "service_pause" in options.only:
        tiny = sources["tiny"].folder
        add("service_pause", await measure_service_pause(tiny, folder / "host", options.small_side, 4, options.runs))
    if "join" in options.only:
        add("join", await measure_join(sources["tiny"].folder, folder / "host", options.small_side, options.runs))
    if "switch" in options.only:
        large = sources["large"].folder
        nbytes = sum(file.stat().st_size for file in large.rglob("*.safetensors"))
        load = (options.requests, options.gap_s)
        add("switch", await measure_switch(large, nbytes, folder / "host2", *load, options.keep_workers))
    if "shift" in options.only:
        add("shift", await measure_shift(cache_dir(), folder / "host3", options.shift_policies, 3, options.shift_s))
    return result


async def _measure_workers(
    workers: Workers, options: argparse.Namespace, add: Callable[[str, dict[str, Any]], None]
) -> None:
    if "regroup" in options.only:
        add("regroup", await measure_regroup(workers, options.group_sizes, options.runs))
    if "handoff" in options.only:
        add("handoff", await measure_handoff(workers, options.runs, options.overlap_s))
    if "pause_resume" in options.only:
        figures = await measure_pause(workers, options.side, steps=2, runs=options.pauses)
        small = await measure_pause(workers, options.small_side, steps=4, runs=options.runs)
        add("pause_resume", figures | {"small": small})
    if "load" in options.only:
        add("load", await measure_load(workers, "large", max(3, options.runs // 4)))


if __name__ == "__main__":
    sys.exit(main())
