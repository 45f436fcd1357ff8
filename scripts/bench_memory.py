"""The memory that workers take for a model whose denoising transformer is larger than what they may use.

A FLUX of random weights is served whole (with memory for all of it), streamed on one worker, and divided among two, all
of them real workers on the CPU. Their images are compared with those of whole weights; one worker of the two is killed
while it denoises. The last line is one JSON object. Exit status: 0 when no worker took more than its memory in
addition to what its libraries take, all images are equal and no request was lost, 1 when not.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import ray
from lib.bench.service import Service, run_service
from lib.benchmark import describe_run, print_result
from lib.command_line import Parser, parse_whole_number
from lib.compare.large_models import LargeModel
from lib.ray_cluster import run_ray_cluster
from numpy.typing import NDArray
from PIL import Image

from tridentserve.byte_sizes import MIB
from tridentserve.engine.live.messages import WorkerConfig
from tridentserve.engine.live.spawning.spawner import ActorSpawner
from tridentserve.engine.live.updates import CompletedUpdate
from tridentserve.engine.live.worker_handle import WorkerHandle
from tridentserve.models.cache import cache_dir
from tridentserve.protocols import Dispatcher
from tridentserve.requests import GenerationInputs, Shape

_MODEL = "large"
# The way in which D is held, and its workers.
_WAYS = {"streamed": 1, "divided": 2}
# The request during which a worker is killed has so many times the steps of the others.
_LONGER = 3
_SAMPLE_S = 0.02

Images = list[NDArray[np.uint8]]


@dataclass(slots=True)
class _WatchedWorkers:
    """The processes of a service's workers, and the most anonymous memory that one of them had while it was watched.
    Mapped files, which the system drops when it needs their memory, are not part of it."""

    spawner: ActorSpawner | None = None
    handles: list[WorkerHandle] = field(default_factory=list)
    peak_bytes: int = 0

    def follow(self, spawner: ActorSpawner) -> _WatchedWorkers:
        """Watch what this one starts."""
        self.spawner = spawner
        return self

    def spawn(self, config: WorkerConfig, index: int) -> WorkerHandle:
        """See `Spawner.spawn`."""
        assert self.spawner is not None
        handle = self.spawner.spawn(config, index)
        self.handles.append(handle)
        return handle

    async def prepare(self, index: int) -> None:
        """See `Spawner.prepare`."""
        assert self.spawner is not None
        await self.spawner.prepare(index)

    def list_ids(self) -> list[int]:
        """The ids of the processes that were started."""
        ids: list[int] = ray.get(
            [handle.actor.__ray_call__.remote(lambda actor: os.getpid()) for handle in self.handles]
        )
        return ids

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch them as long as the block lasts."""
        ids, ended = self.list_ids(), threading.Event()

        def look() -> None:
            while not ended.wait(_SAMPLE_S):
                self.peak_bytes = max(self.peak_bytes, *map(read_anonymous_bytes, ids))

        self.peak_bytes = max(map(read_anonymous_bytes, ids))
        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def main() -> int:
    options = _parse_arguments()
    run = describe_run(libraries=("ray", "torch", "diffusers"))
    with run_ray_cluster(4, os.environ.get("RAY_ADDRESS")), tempfile.TemporaryDirectory() as folder:
        figures, holds = asyncio.run(_measure(options, Path(folder)))
    print_result(run, figures)
    return 0 if holds else 1


def _parse_arguments() -> argparse.Namespace:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=parse_whole_number, default=32, help="layers of the transformer")
    parser.add_argument("--heads", type=parse_whole_number, default=32, help="its attention heads, 0.5 MB a layer each")
    parser.add_argument(
        "--memory-mb", type=parse_whole_number, default=450, help="memory of a worker that does not hold it whole"
    )
    parser.add_argument("--side", type=parse_whole_number, default=128, help="side of the images")
    parser.add_argument("--requests", type=parse_whole_number, default=6, help="requests of each way, two at a time")
    parser.add_argument("--steps", type=parse_whole_number, default=4, help="denoising steps of a request")
    parser.add_argument(
        "--ways", choices=_WAYS, nargs="+", default=list(_WAYS), help="compare only these with whole weights"
    )
    parser.add_quick(layers=24, heads=16, memory_mb=96, requests=2, steps=2, ways=["divided"])
    return parser.parse_args()


async def _measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    model = LargeModel.make(_MODEL, folder, options.layers, options.heads, cache_dir())
    budget = options.memory_mb * MIB
    if model.diffuse_bytes <= budget:
        sys.exit(
            f"bench_memory: D has {model.diffuse_bytes} bytes, which --memory-mb has room for; ask for more --layers"
        )
    whole, images = await _serve(options, folder, model, "auto", 1, memory_mb=2 * model.diffuse_bytes // MIB + 1024)
    figures: dict[str, Any] = {
        "diffuse_weights_bytes": model.diffuse_bytes,
        "memory_bytes": budget,
        "whole": whole,
    }
    holds = True
    for way in options.ways:
        found, made = await _serve(options, folder, model, way, _WAYS[way], options.memory_mb)
        found["largest_difference"] = max(_compare(*pair) for pair in zip(images, made, strict=True))
        figures[way] = found
        # What a worker has with whole weights, which are a mapped file, is that of libraries and activations.
        found["beside_whole_bytes"] = found["peak_anonymous_bytes"] - whole["peak_anonymous_bytes"]
        holds &= found["beside_whole_bytes"] <= budget and found["largest_difference"] <= 1
        holds &= found["completed"] == options.requests
    return figures, holds


async def _serve(
    options: argparse.Namespace, folder: Path, model: LargeModel, way: str, workers: int, memory_mb: int
) -> tuple[dict[str, Any], Images]:
    """Figures and images of one way."""
    args: dict[str, Any] = {
        "models": [
            {"name": model.name, "path": str(model.folder), "weights": way, "limits": {"max_side": options.side}}
        ],
        "profiles": [str(model.table)],
        "cluster": {"workers_per_node": workers, "memory_mb": memory_mb, "cpus_per_worker": 0.1},
        "handoff": {"capacity_mb": 4},
        "expected_load": [
            {"model": model.name, "width": options.side, "height": options.side, "num_inference_steps": options.steps}
        ],
    }
    processes = _WatchedWorkers()
    async with run_service(
        args, model.folder, folder / "host", lambda inner: inner, choose_spawner=processes.follow
    ) as service:
        idle_bytes = max(map(read_anonymous_bytes, processes.list_ids()))
        with processes.watch():
            ended = await _ask_all(service, options)
        figures: dict[str, Any] = {
            "completed": len(ended),
            "idle_anonymous_bytes": idle_bytes,
            "peak_anonymous_bytes": processes.peak_bytes,
        }
        if way == "divided":
            figures["killed"] = await _kill_one(service, processes, options)
    return figures, [_read_image(update.outputs[0]) for update in ended]


async def _ask_all(service: Service[Dispatcher], options: argparse.Namespace) -> list[CompletedUpdate]:
    """The results of requests of different seeds, two at a time."""
    at_once = asyncio.Semaphore(2)

    async def ask(seed: int) -> CompletedUpdate:
        async with at_once:
            return await service.ask(f"request-{seed}", _MODEL, _make_inputs(options.side, options.steps, seed))

    return await asyncio.gather(*map(ask, range(options.requests)))


async def _kill_one(
    service: Service[Dispatcher], processes: _WatchedWorkers, options: argparse.Namespace
) -> dict[str, Any]:
    """A request whose second worker is killed while it denoises, and one after it."""
    inputs = _make_inputs(options.side, _LONGER * options.steps, seed=1)
    whole_s = sum(span.seconds for span in (await service.ask("undisturbed", _MODEL, inputs)).timeline)
    request = asyncio.create_task(service.ask("disturbed", _MODEL, inputs))
    await asyncio.sleep(whole_s / 2)
    os.kill(processes.list_ids()[-1], signal.SIGKILL)
    disturbed = await request
    after = await service.ask("after", _MODEL, _make_inputs(options.side, options.steps, seed=2))
    return {
        "completed": len([disturbed, after]),
        "retries": disturbed.retries,
        "latency_s": disturbed.latency_s,
        "undisturbed_s": round(whole_s, 3),
    }


def _make_inputs(side: int, steps: int, seed: int) -> GenerationInputs:
    return GenerationInputs("a red circle", Shape(side, side), steps, 4.0, seed=seed)


def _read_image(output: Any) -> NDArray[np.uint8]:
    """The pixels of an output: a PNG file, or a reference to one."""
    return np.asarray(Image.open(io.BytesIO(output if isinstance(output, bytes) else ray.get(output))))


def _compare(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    """The largest difference of two images, in 255ths."""
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def read_anonymous_bytes(process_id: int) -> int:
    """The anonymous memory of a process in bytes, as Linux tells it; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


if __name__ == "__main__":
    sys.exit(main())
