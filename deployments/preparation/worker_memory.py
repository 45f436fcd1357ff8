"""`cluster.memory_mb: auto`: the memory that each worker may have, by what its device has."""

from __future__ import annotations

import asyncio
import logging

from deployments.config.app import AppArgs
from deployments.config.host_memory import share_host_bytes
from deployments.preparation.worker_seat import WorkerSeats
from tridentserve.byte_sizes import MIB
from tridentserve.errors import ConfigError

# The rest is for what the driver and torch take beside the tensors that are counted.
_GPU_SHARE = 0.95

logger = logging.getLogger(__name__)


async def settle_memory(args: AppArgs, seats: WorkerSeats) -> AppArgs:
    """The configuration with a number in place of `auto`: the least of all nodes. Raises `ConfigError` where the
    handoff buffer alone needs as much."""
    cluster = args.cluster
    if cluster.memory_mb != "auto":
        return args
    found = await asyncio.gather(
        *(
            seats.run(index, measure_worker_bytes, cluster.device, cluster.workers_per_node)
            for index in range(len(seats.bundles))
        )
    )
    memory_mb = min(found) // MIB
    logger.info("cluster.memory_mb: auto is %d MiB here", memory_mb)
    if args.handoff.capacity_mb >= memory_mb:
        raise ConfigError(f"handoff.capacity_mb: not below cluster.memory_mb (`auto`: {memory_mb})")
    return args.model_copy(update={"cluster": cluster.model_copy(update={"memory_mb": memory_mb})})


def measure_worker_bytes(device: str, workers_per_node: int) -> int:
    """Bytes for one worker of the node on which this runs."""
    if device == "cpu":
        return share_host_bytes(workers_per_node)
    from profiler.measure.memory import count_free_bytes

    return int(_GPU_SHARE * count_free_bytes(device))
