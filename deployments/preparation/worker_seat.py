"""Runs a task where a worker of the service will be, with that worker's resources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tridentserve.engine.live.spawning.start_options import list_start_options


@dataclass(frozen=True, slots=True)
class WorkerSeats:
    """Workers of a service, before they are started."""

    group: PlacementGroup
    bundles: tuple[int, ...]
    """The index of each worker's bundle in the group."""
    num_cpus: float
    num_gpus: float

    async def run(self, index: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function in a process that ends with it. Raises what it raises."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[index])
        # Ended, so that the worker has all of its memory.
        task = ray.remote(max_calls=1, max_retries=0)(function).options(
            num_cpus=self.num_cpus,
            num_gpus=self.num_gpus,
            scheduling_strategy=strategy,
            **list_start_options(has_gpu=self.num_gpus > 0),
        )
        try:
            return await task.remote(*args)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise
