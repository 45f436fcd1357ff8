"""The GPUs that a service wants, and whether Ray has as many. Until it has, Ray holds the Scheduler back in silence."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from deployments.config.app import AppArgs

WAITING_FOR_GPUS = "waiting_for_gpus"
"""The status of `GET /health` meanwhile."""


def count_gpus_per_worker(args: AppArgs) -> float:
    """As Ray counts them."""
    return 1.0 if args.cluster.has_gpus else 0.0


def count_gpus(args: AppArgs) -> int:
    """All that a service wants. `args` is the configuration of the whole service."""
    return int(count_gpus_per_worker(args) * args.cluster.num_workers)


def find_gpu_shortage(num_gpus: int) -> str | None:
    """Tell what is missing where Ray's nodes have fewer GPUs than this, whoever uses them; None where they have enough.
    Blocks for a call of Ray."""
    if not num_gpus:
        return None
    found = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    if found >= num_gpus:
        return None
    return (
        f"Ray has {found} GPUs, and this configuration wants {num_gpus} (one for each of cluster.nodes x "
        "cluster.workers_per_node workers of cluster.device: cuda): take a file with fewer workers, or with "
        "cluster.device: cpu, or a Ray cluster (RAY_ADDRESS) that has them; nodes that join it later are used"
    )


async def describe_waiting(num_gpus: int) -> dict[str, Any] | None:
    """The health of a service whose Scheduler waits for GPUs; None where it does not."""
    shortage = await asyncio.to_thread(find_gpu_shortage, num_gpus) if num_gpus else None
    return {"status": WAITING_FOR_GPUS, "workers": 0, "problems": [shortage]} if shortage else None
