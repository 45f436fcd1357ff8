"""The Scheduler deployment: exactly one replica, which owns the workers and drives them by the pure scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from ray import serve

from deployments.config.app import AppArgs
from deployments.config.live import SCHEDULER, live_args
from deployments.model_updates.catalogue import Catalogue
from deployments.model_updates.reconciler import ModelKeeper
from deployments.schemas.image_limits import MAX_HELD_BYTES, PictureRoom
from deployments.serve.start import start
from tridentserve.engine.live.engine import LiveEngine
from tridentserve.engine.live.updates import FailedUpdate, Update
from tridentserve.errors import ConfigError, OverloadedError, WorkerError
from tridentserve.long_lived import spare_long_lived
from tridentserve.requests import GenerationInputs, RequestSpec


class SchedulerDeployment:
    """The event loop around the pure core. Ray Serve calls `reconfigure` before the first request, which returns when
    all workers can take plans, and whenever the `user_config` has changed."""

    def __init__(self, args: AppArgs) -> None:
        self._args = args
        self._engine: LiveEngine | None = None
        self._keeper: ModelKeeper | None = None
        self._pictures = PictureRoom(MAX_HELD_BYTES)

    async def reconfigure(self, user_config: Any) -> None:
        """Start, or bring the running service to other models. Never raises once it runs: Ray Serve would replace the
        replica, and all workers with it. Returns at once then: meanwhile, no request reaches the replica."""
        if self._keeper is None:
            self._engine, self._keeper = await start(live_args(self._args, user_config), _gpus_per_worker(self._args))
            spare_long_lived()
            return
        try:
            self._keeper.want(live_args(self._args, user_config))
        except ConfigError as error:
            self._keeper.refuse(str(error).splitlines())

    async def catalogue(self, edition: str | None, wait_s: float) -> Catalogue:
        """The models that take requests, as soon as they are others than in `edition`; after `wait_s` in any case."""
        if self._keeper is None:
            raise WorkerError("the service is starting")
        return await self._keeper.catalogue.other_than(edition, wait_s)

    async def generate(self, spec: RequestSpec, inputs: GenerationInputs) -> AsyncIterator[Update]:
        """See `deployments.backend.Backend`; pictures come as references, not as bytes."""
        if not self._pictures.has_room(inputs.image):
            message = "the pictures of unfinished requests take all their room, try again later"
            yield FailedUpdate(spec.request_id, OverloadedError.code, message)
            return
        with self._pictures.holding(inputs.image):
            async with aclosing(self._started().generate(spec, inputs)) as updates:
                async for update in updates:
                    yield update

    async def cancel(self, request_id: str) -> bool:
        return self._started().cancel(request_id)

    async def health(self) -> dict[str, Any]:
        alive = self._started().workers_alive()
        total = self._args.cluster.num_workers
        status = "ready" if len(alive) == total else "degraded" if alive else "starting"
        placement = self._started().placement
        models = self._keeper.state() if self._keeper is not None else {}
        return {"status": status, "workers": len(alive), "workers_total": total, "placement": placement, **models}

    def check_health(self) -> None:
        """For Ray Serve: only that the scheduler's thread is alive. Waiting for workers here would let the loss of
        one take the application down."""
        if self._engine is not None and not self._engine.healthy:
            raise WorkerError("the scheduler's thread has ended")

    def _started(self) -> LiveEngine:
        if self._engine is None:
            raise WorkerError("the service is starting")
        return self._engine


def make_scheduler_deployment(args: AppArgs) -> serve.Deployment:
    """The deployment with its devices reserved: bundle 0 for the replica itself, one bundle per worker."""
    gpus = _gpus_per_worker(args)
    worker = {"CPU": args.cluster.cpus_per_worker, **({"GPU": gpus} if gpus else {})}
    return serve.deployment(
        name=SCHEDULER,
        num_replicas=1,
        max_ongoing_requests=100_000,  # the queue is the engine's: it refuses beyond `max_queued_requests`
        ray_actor_options={"num_cpus": _REPLICA_CPUS},
        placement_group_bundles=[{"CPU": _REPLICA_CPUS}, *[worker] * args.cluster.num_workers],
        placement_group_strategy="PACK",
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=10.0,
        user_config={},  # without one, Ray Serve would not call `reconfigure`
    )(SchedulerDeployment)


_REPLICA_CPUS = 0.1


def _gpus_per_worker(args: AppArgs) -> float:
    return 1.0 if args.cluster.device == "cuda" else 0.0
