"""What the live engine takes to move things, on real workers (CPU processes): groups, tensors, weights, requests.

`regroup`: workers become an instance. `handoff`: 64 MiB through NIXL and through Ray's object store. `load`: weights
from a peer, the host copy, the checkpoint. `pause_resume`: a request stops and goes on. `switch`: another placement
under load. Medians; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ray
from lib.bench.checkpoint import make_checkpoint
from lib.bench.handing_off import measure_handoff
from lib.bench.loading import measure_load
from lib.bench.pausing import measure_pause, measure_service_pause
from lib.bench.regrouping import measure_regroup
from lib.bench.switching import measure_switch
from lib.bench.workers import started
from lib.command_line import Parser, positive, whole_number

from tridentserve.engine.live.messages import ModelSource
from tridentserve.models.cache import cache_dir
from tridentserve.pipelines.tiny.build import ensure_tiny

# Room for two parcels of 64 MiB: one that leaves, one that arrives.
_HANDOFF_BYTES = 160 << 20
PARTS = ("regroup", "handoff", "load", "pause_resume", "switch")


def main() -> int:
    options = _arguments()
    print(
        f"machine: {platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, ray {ray.__version__}"
    )
    print(f"command: python {' '.join(sys.argv)}")
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=4)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = asyncio.run(_measure(options, Path(folder)))
    finally:
        ray.shutdown()
    print(json.dumps(result))
    return 0


def _arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="measure these alone")
    parser.add_argument("--runs", type=whole_number, default=20, help="of each measurement")
    parser.add_argument(
        "--layers", type=whole_number, default=6, help="of the transformer that is loaded, about 40 MB each"
    )
    parser.add_argument(
        "--side", type=whole_number, default=1536, help="of the picture that is paused; a step takes seconds"
    )
    parser.add_argument("--pauses", type=whole_number, default=4, help="of that picture")
    parser.add_argument("--small-side", type=whole_number, default=512, help="of a picture whose steps are short")
    parser.add_argument("--requests", type=whole_number, default=80, help="during the switch")
    parser.add_argument("--gap-s", type=positive(float), default=0.8, help="seconds between two of them")
    return parser.parse_args()


async def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}

    def add(name: str, figures: dict[str, Any]) -> None:
        result[name] = figures
        print(f"{name}: {json.dumps(figures)}", flush=True)

    tiny = ModelSource("tiny", ensure_tiny("sd3", cache_dir()))
    if {"regroup", "handoff", "pause_resume"}.intersection(options.only):
        async with started(4, {"tiny": tiny}, folder / "host", handoff_bytes=_HANDOFF_BYTES) as workers:
            if "regroup" in options.only:
                add("regroup", await measure_regroup(workers, options.runs))
            if "handoff" in options.only:
                add("handoff", await measure_handoff(workers, options.runs))
            if "pause_resume" in options.only:
                figures = await measure_pause(workers, options.side, steps=2, runs=options.pauses)
                small = await measure_pause(workers, options.small_side, steps=4, runs=options.runs)
                service = await measure_service_pause(tiny.folder, folder / "host", options.small_side, 4, options.runs)
                add("pause_resume", figures | {"small": small | service})
    if {"load", "switch"}.intersection(options.only):
        large = make_checkpoint(folder / "large", options.layers)
        if "load" in options.only:
            add("load", await measure_load(ModelSource("large", large), max(3, options.runs // 4)))
        if "switch" in options.only:
            nbytes = sum(file.stat().st_size for file in large.rglob("*.safetensors"))
            add("switch", await measure_switch(large, nbytes, folder / "host2", options.requests, options.gap_s))
    return result


if __name__ == "__main__":
    sys.exit(main())
