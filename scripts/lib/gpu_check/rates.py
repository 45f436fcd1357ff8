"""The rates at which bytes go between host memory and a GPU, and between two processes' memory on it."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from profiler.measure.stages import measure_seconds
from tridentserve.device import find_device
from tridentserve.device.pinned_memory import PinnedMemory
from tridentserve.engine.live.transport.nixl_link import NixlLink
from tridentserve.engine.live.transport.nixl_memory import locate_memory
from tridentserve.engine.live.weights.weights_loader import copy_blocks
from tridentserve.engine.options import WorkerOptions

_NUM_RUNS = 5
_PATIENCE_S = 120.0
_NOTE = b"rates"


def measure_host_rates(num_bytes: int, folder: Path) -> dict[str, float]:
    """GB/s between the GPU and each kind of host memory: torch's own, pageable and pinned, and mapped files in `folder`
    and on the tmpfs /dev/shm, as weights are loaded."""
    device = torch.device("cuda", 0)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    pageable = torch.zeros(num_bytes, dtype=torch.uint8)
    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    rates = {
        "pageable_to_gpu": _rate(lambda: target.copy_(pageable), num_bytes, device),
        "pinned_to_gpu": _rate(lambda: target.copy_(pinned, non_blocking=True), num_bytes, device),
        "gpu_to_pageable": _rate(lambda: pageable.copy_(target), num_bytes, device),
        "gpu_to_pinned": _rate(lambda: pinned.copy_(target, non_blocking=True), num_bytes, device),
    }
    for name, place in (("file", folder), ("tmpfs", Path("/dev/shm"))):
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            path = Path(scratch) / "weights.bin"
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            mapped = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
            mapped.fill_(1)
            owner = PinnedMemory(find_device(device))
            rates[f"{name}_is_pinned"] = float(owner.pin(mapped, path))
            load = _make_load(target, mapped)
            rates[f"{name}_to_gpu"] = _rate(load, num_bytes, device)
            owner.unpin(mapped)
    return rates


def _make_load(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    block_bytes = WorkerOptions().block_bytes
    return lambda: copy_blocks(target, source, block_bytes)


def _rate(run: Callable[[], object], num_bytes: int, device: torch.device) -> float:
    run()
    seconds = statistics.median(measure_seconds(run, device) for _ in range(_NUM_RUNS))
    return round(num_bytes / seconds / 1e9, 2)


def measure_nixl_rate(num_bytes: int) -> dict[str, float]:
    """GB/s from one process's memory on the GPU into another's, through NIXL."""
    slab = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_receive, args=(theirs, num_bytes), daemon=True)
    process.start()
    link = NixlLink("rate-sender", slab)
    address = ours.recv()
    ours.send(link.address)
    link.add_peer(address).result(_PATIENCE_S)
    times_s = []
    for _ in range(_NUM_RUNS + 1):
        ours.recv()

        def write() -> None:
            _, written = link.write(address.name, [(locate_memory(slab), 0)], 0, _NOTE)
            written.result(_PATIENCE_S)

        times_s.append(measure_seconds(write, slab.device))
    process.join(_PATIENCE_S)
    link.close()
    return {"first_write_s": round(times_s[0], 4), "gpu_to_gpu": round(num_bytes / min(times_s[1:]) / 1e9, 2)}


def _receive(pipe: Connection, num_bytes: int) -> None:
    link = NixlLink("rate-receiver", torch.zeros(num_bytes, dtype=torch.uint8, device="cuda"))
    pipe.send(link.address)
    link.add_peer(pipe.recv()).result(_PATIENCE_S)
    for _ in range(_NUM_RUNS + 1):
        _, arrived = link.expect(_NOTE)
        pipe.send("ready")
        arrived.result(_PATIENCE_S)
    link.close()
