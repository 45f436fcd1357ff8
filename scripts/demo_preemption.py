"""Shows requests that move between worker sets at step boundaries, without any change of their images.

Starts the service of a config file on a free port (without HTTP options of its own), replays a trace of equal requests
that overlap with `replay_trace.py`, and looks at the Chrome trace: at least one request must have had `--worker-sets`
different sets of workers. Its image is compared with that of the stock diffusers pipeline, which knows neither
workers nor steps that wait. The last line is one JSON object. Exit status: 0 when all of this is so, 1 when not.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import numpy as np
import torch
import yaml
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, make_positive, parse_whole_number
from lib.local_service import add_serve_url, run_local_service
from numpy.typing import NDArray
from PIL import Image

from deployments.config.app import AppArgs
from traces.formats.ours import write_trace
from traces.requests import TraceRequest

_ROOT = Path(__file__).parent.parent
_GUIDANCE_SCALE = 5.0
# Loose: all requests share the workers, and none is hurried.
_SLO_MS = 600_000.0
# Steps of 255: several workers, and prompts that were encoded together, change the last bits.
_ROUNDING = 1
_GAP_S, _CROWDED_GAP_S = 0.4, 1.2


def main() -> int:
    options = _parse_arguments()
    content = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    run = describe_run(libraries=("ray", "torch", "diffusers"))
    args = AppArgs.model_validate(content["applications"][0]["args"])
    if options.workers is not None:
        cluster = args.cluster.model_copy(update={"workers_per_node": options.workers})
        args = args.model_copy(update={"cluster": cluster})
    gap_s = options.gap_s or _choose_gap(args)
    requests = [
        TraceRequest(
            request_id=f"request-{index}",
            timestamp_s=round(index * gap_s, 3),
            height=options.side,
            width=options.side,
            num_frames=1,
            prompt=f"number {index}",
            negative_prompt="",
            num_inference_steps=options.steps,
            slo_ms=_SLO_MS,
            seed=index,
            guidance_scale=_GUIDANCE_SCALE,
        )
        for index in range(options.requests)
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    write_trace(requests, options.out / "trace.csv")
    # The service starts in processes of its own; meanwhile this one loads the stock pipeline.
    with ThreadPoolExecutor() as beside:
        loading = beside.submit(_load_stock_pipeline, args)
        with run_local_service(args, options.serve_url) as url:
            status = _replay(options.out, url)
            moved = _find_most_moved(options.out / "trace.json")
            index = int(moved[0].split("-")[1])  # the id of the service: run, index of the row, id of the row
            image = _fetch_image(url, requests[index], args.models[0].name, moved[0])
        pipeline = loading.result()
    torch.set_num_threads(args.cluster.cpu_threads)
    difference = _measure_difference(image, _make_stock_image(pipeline, requests[index]))
    return _report(run, options, moved, requests[index], difference) if status == 0 else status


def _parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=_ROOT / "deployments" / "tetriserve.yaml")
    parser.add_argument("--requests", type=parse_whole_number, default=10)
    parser.add_argument(
        "--gap-s",
        type=make_positive(float),
        help=f"seconds between two requests (default {_GAP_S:g}; {_CROWDED_GAP_S:g} where workers share cores)",
    )
    parser.add_argument("--side", type=parse_whole_number, default=512, help="width and height in pixels")
    parser.add_argument("--steps", type=parse_whole_number, default=40)
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo-preemption"), help="directory for the trace and the report"
    )
    parser.add_argument(
        "--workers", type=parse_whole_number, metavar="N", help="workers, instead of those of the configuration"
    )
    parser.add_argument(
        "--worker-sets",
        type=parse_whole_number,
        default=3,
        metavar="N",
        help="worker sets that one request must have had (default %(default)s)",
    )
    add_serve_url(parser)
    parser.add_quick(requests=3, gap_s=0.1, side=64, steps=6, workers=2, worker_sets=1)
    return parser.parse_args()


def _choose_gap(args: AppArgs) -> float:
    """Some requests have to begin while others run, and some workers have to be free meanwhile."""
    cores = len(os.sched_getaffinity(0)) // args.cluster.cpu_threads
    return _GAP_S if cores >= args.cluster.num_workers else _CROWDED_GAP_S


def _replay(out: Path, url: str) -> int:
    command = [sys.executable, str(_ROOT / "scripts" / "replay_trace.py"), str(out / "trace.csv"), "--url", url]
    return subprocess.run([*command, "--out", str(out)], check=False).returncode


def _find_most_moved(trace: Path) -> tuple[str, list[tuple[str, ...]]]:
    """The request with the most worker sets in a Chrome trace: its id in the service, and the sets in their order."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    # A stage of several workers is one slice on the row of each.
    rows: defaultdict[tuple[str, float], list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["args"]["stage"] == "diffuse":
            rows[event["args"]["service_request_id"], event["args"]["start_s"]].append(names[event["tid"]])
    sets: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for (request_id, _), workers in sorted(rows.items()):
        if sets[request_id][-1:] != [tuple(sorted(workers))]:
            sets[request_id].append(tuple(sorted(workers)))
    return max(sets.items(), key=lambda item: len(set(item[1])))


def _fetch_image(url: str, request: TraceRequest, model: str, service_request_id: str) -> NDArray[np.uint8]:
    """The image that the service has made: the same id gets the finished result once more."""
    body = {
        "model": model,
        "prompt": request.prompt,
        "size": f"{request.width}x{request.height}",
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "seed": request.seed,
        "slo_ms": request.slo_ms,
        "request_id": service_request_id,
    }
    # Not through a proxy of the environment: the service is on this machine.
    answer = httpx.post(f"{url}/v1/images/generations", json=body, timeout=600.0, trust_env=False)
    answer.raise_for_status()
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))))


def _load_stock_pipeline(args: AppArgs) -> Any:
    # Imported here, beside the start of the service: both take seconds.
    import diffusers

    from tridentserve.pipelines.tiny.build import ensure_tiny

    folder = ensure_tiny("sd3", args.cache_dir)
    pipeline: Any = diffusers.StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _make_stock_image(pipeline: Any, request: TraceRequest) -> NDArray[np.uint8]:
    result = pipeline(
        prompt=request.prompt,
        width=request.width,
        height=request.height,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=_GUIDANCE_SCALE,
        generator=torch.Generator("cpu").manual_seed(request.seed or 0),
    )
    return np.asarray(result.images[0])


def _measure_difference(image: NDArray[np.uint8], stock: NDArray[np.uint8]) -> int:
    return int(np.abs(image.astype(int) - stock.astype(int)).max())


def _report(
    run: dict[str, str],
    options: argparse.Namespace,
    moved: tuple[str, list[tuple[str, ...]]],
    request: TraceRequest,
    difference: int,
) -> int:
    sets = moved[1]
    different, degrees = len(set(sets)), sorted({len(workers) for workers in sets})
    print(f"{request.request_id} was denoised on: {'; '.join('+'.join(workers) for workers in sets)}")
    print(f"largest difference from the stock pipeline's image: {difference} of 255")
    result = {
        "requests": options.requests,
        "worker_sets": different,
        "degrees": degrees,
        "moves": len(sets) - 1,
        "max_difference": difference,
    }
    print_result(run, result)
    return 0 if different >= options.worker_sets and difference <= _ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
