"""Starts the processes of workers, as actors of Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tridentserve.engine.live.messages import WorkerConfig
from tridentserve.engine.live.spawning.start_options import list_start_options
from tridentserve.engine.live.worker.worker_actor import StageWorker
from tridentserve.engine.live.worker_handle import WorkerHandle

# The waiting calls of an async actor must not be held back by its default bound of 1000.
_MAX_CONCURRENCY = 10_000


class Spawner(Protocol):
    """The way in which a fleet gets its workers."""

    def spawn(self, config: WorkerConfig, index: int) -> WorkerHandle:
        """Begin to start the worker that is the `index`-th of the fleet; its handle takes calls at once."""

    async def prepare(self, index: int) -> None:
        """Bring what that worker needs to where it will be. Called before it is tried again where it did not start,
        perhaps because its node is another one."""


@dataclass(frozen=True, slots=True)
class ActorSpawner:
    """A `Spawner` with the resources that Ray reserves for each worker."""

    num_cpus: float
    num_gpus: float = 0.0
    group: PlacementGroup | None = None
    """Ray's placement group that the workers are started in, if there is one."""
    bundles: tuple[int, ...] = ()
    """Index of each worker's bundle in that group."""
    bring: Callable[[int], Awaitable[None]] | None = None
    """Brings what a worker needs to the node of its bundle, which this index says."""

    def spawn(self, config: WorkerConfig, index: int) -> WorkerHandle:
        """See `Spawner.spawn`."""
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "max_concurrency": _MAX_CONCURRENCY,
            **list_start_options(has_gpu=self.num_gpus > 0),
        }
        if self.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.bundles[index]
            )
        actor: Any = ray.remote(StageWorker).options(**options).remote(config)
        return WorkerHandle(actor)

    async def prepare(self, index: int) -> None:
        """See `Spawner.prepare`."""
        if self.bring is not None:
            await self.bring(self.bundles[index])
