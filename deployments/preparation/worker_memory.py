"""`cluster.memory_mb: auto`: the memory that each worker may have, by what its device has."""

from __future__ import annotations

import asyncio
import logging

from deployments.config.app import AppArgs, ClusterArgs
from deployments.config.host_memory import share_host_bytes
from deployments.preparation.worker_seat import WorkerSeats
from tridentserve.byte_sizes import MIB
from tridentserve.cluster import BUDGET_SHARE
from tridentserve.errors import ConfigError
from tridentserve.scheduling.estimation.hot_groups import GROUP_BYTES, LARGEST_GROUP_BYTES, count_hot_groups

logger = logging.getLogger(__name__)


async def settle_memory(args: AppArgs, seats: WorkerSeats) -> AppArgs:
    """The configuration with a number in place of `auto`: the least of all nodes. Raises `ConfigError` where the
    handoff buffer alone needs as much."""
    cluster = args.cluster
    if cluster.memory_mb != "auto":
        return args
    found = await asyncio.gather(
        *(seats.run(index, measure_worker_bytes, cluster) for index in range(len(seats.bundles)))
    )
    memory_mb = min(found) // MIB
    logger.info("cluster.memory_mb: auto is %d MiB here", memory_mb)
    if args.handoff.capacity_mb >= memory_mb:
        raise ConfigError(f"handoff.capacity_mb: not below cluster.memory_mb (`auto`: {memory_mb})")
    return args.model_copy(update={"cluster": cluster.model_copy(update={"memory_mb": memory_mb})})


def measure_worker_bytes(cluster: ClusterArgs) -> int:
    """Bytes for one worker of the node on which this runs."""
    if not cluster.has_gpus:
        return share_host_bytes(cluster.workers_per_node)
    from profiler.measure.memory import count_free_bytes

    return share_gpu_bytes(count_free_bytes(cluster.device), cluster.workers_per_node, cluster.max_groups)


def share_gpu_bytes(free_bytes: int, workers_per_node: int, max_groups: int) -> int:
    """Bytes of a GPU for one worker. The rest has room for the process groups of the start and one more, should they
    take the most that any has been seen to, where that is more than is planned for groups."""
    num_groups = count_hot_groups(workers_per_node)
    wanted_bytes = min(num_groups + 1, max_groups) * LARGEST_GROUP_BYTES if num_groups else 0
    return min(int(BUDGET_SHARE * free_bytes), free_bytes - wanted_bytes + max_groups * GROUP_BYTES["cuda"])
