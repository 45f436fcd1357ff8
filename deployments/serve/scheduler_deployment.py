"""The Scheduler deployment: exactly one replica, which owns the workers and runs the pure scheduler's plans on them.
Other replicas reach it through `RemoteBackend`.

The engine is imported when the replica starts: the processes that only have a client do not need it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable
from contextlib import aclosing
from contextvars import Context
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import serve

from deployments.config.app import AppArgs
from deployments.config.live import SCHEDULER, apply_user_config
from deployments.model_updates.catalogue import Catalogue
from deployments.schemas.image_limits import MAX_HELD_BYTES, ImageBudget
from deployments.serve.open_calls import OpenCalls
from deployments.serve.ray_errors import translate_ray_errors
from tridentserve.engine.live.updates import CompletedUpdate, FailedUpdate, QueuedUpdate, Update
from tridentserve.errors import ConfigError, OverloadedError, WorkerError
from tridentserve.long_lived import spare_long_lived
from tridentserve.requests import GenerationInputs, RequestSpec

if TYPE_CHECKING:
    from deployments.model_updates.reconciler import ModelReconciler
    from tridentserve.engine.live.engine import LiveEngine

# Every waiting request takes one place in a replica of Api or Videos; the bound that counts is the scheduler's.
MAX_ONGOING_REQUESTS = 10_000

logger = logging.getLogger(__name__)


class SchedulerDeployment:
    """The event loop around the pure core. Ray Serve calls `reconfigure` before the first request (it returns when all
    workers can take plans) and whenever the `user_config` has changed."""

    def __init__(self, args: AppArgs) -> None:
        self._args = args
        self._engine: LiveEngine | None = None
        self._reconciler: ModelReconciler | None = None
        self._images = ImageBudget(MAX_HELD_BYTES)
        self._calls = OpenCalls()

    async def reconfigure(self, user_config: Any) -> None:
        """Start the service, or bring the running service to other models. A running service never raises here, because
        Ray Serve would replace the replica and all workers with it; and it returns at once, because no request reaches
        the replica meanwhile."""
        if self._reconciler is None:
            from deployments.serve.start import start_engine

            args = apply_user_config(self._args, user_config)
            self._engine, self._reconciler = await start_engine(args, _count_gpus_per_worker(self._args))
            spare_long_lived()
            return
        try:
            self._reconciler.reconcile_to(apply_user_config(self._args, user_config))
        except ConfigError as error:
            self._reconciler.refuse(str(error).splitlines())

    async def get_catalogue(self, known_version: str | None, timeout_s: float) -> Catalogue:
        """Long-poll the models that take requests: return when they differ from `known_version`, or after `timeout_s`
        seconds."""
        if self._reconciler is None:
            raise WorkerError("the service is starting")
        return await self._reconciler.catalogue.wait_for_change(known_version, timeout_s)

    async def generate(self, spec: RequestSpec, inputs: GenerationInputs, call_id: str) -> AsyncIterator[list[Update]]:
        """The updates that `deployments.backend.Backend` describes, but several at a time, as each item of a stream
        costs both processes two milliseconds, and the outputs are references instead of bytes. `call_id` names this
        call for `end_call`; no two calls have the same."""
        async with aclosing(self._follow(spec, inputs, call_id, with_progress=True)) as batches:
            async for batch in batches:
                yield batch

    async def wait_for_end(self, spec: RequestSpec, inputs: GenerationInputs, call_id: str) -> Update:
        """The last update of `generate`, for clients that need no others: a call costs less than a stream."""
        update: Update = QueuedUpdate(spec.request_id)
        async with aclosing(self._follow(spec, inputs, call_id, with_progress=False)) as batches:
            async for batch in batches:
                update = batch[-1]
        return update

    async def _follow(
        self, spec: RequestSpec, inputs: GenerationInputs, call_id: str, *, with_progress: bool
    ) -> AsyncGenerator[list[Update], None]:
        if not self._images.has_room(inputs.image):
            message = "the images of unfinished requests take all their room, try again later"
            yield [FailedUpdate(spec.request_id, OverloadedError.code, message)]
            return
        with self._calls.hold(call_id), self._images.hold(inputs.image):
            engine = self._require_engine()
            async with aclosing(engine.generate_in_batches(spec, inputs, with_progress)) as batches:
                async for batch in batches:
                    yield batch

    async def end_call(self, call_id: str) -> None:
        """The caller of this `generate` or `wait_for_end` has left."""
        self._calls.end(call_id)

    async def cancel(self, request_id: str) -> bool:
        return self._require_engine().cancel(request_id)

    async def get_health(self) -> dict[str, Any]:
        alive = self._require_engine().list_live_workers()
        total = self._args.cluster.num_workers
        status = "ready" if len(alive) == total else "degraded" if alive else "starting"
        placement = self._require_engine().placement
        models = self._reconciler.describe() if self._reconciler is not None else {}
        return {"status": status, "workers": len(alive), "workers_total": total, "placement": placement, **models}

    def check_health(self) -> None:
        """Raises when the scheduler's thread has ended. If it also asked for workers, the loss of one would take the
        application down."""
        if self._engine is not None and not self._engine.healthy:
            raise WorkerError("the scheduler's thread has ended")

    def _require_engine(self) -> LiveEngine:
        if self._engine is None:
            raise WorkerError("the service is starting")
        return self._engine


class RemoteBackend:
    """The `Backend` of the other deployments: the Scheduler deployment behind a handle."""

    def __init__(self, handle: Any) -> None:
        """`handle` is a `ray.serve.handle.DeploymentHandle`, whose types do not know of streaming."""
        self._handle = handle
        self._streaming = handle.options(stream=True)
        self._ending: set[asyncio.Task[None]] = set()

    async def generate(
        self, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool = True
    ) -> AsyncIterator[Update]:
        call_id, has_ended = uuid.uuid4().hex, False
        ask = self._streaming.generate if with_progress else self._handle.wait_for_end
        with translate_ray_errors():
            call = ask.remote(spec, inputs, call_id)
            try:
                async for update in _flatten(call) if with_progress else _wait(call):
                    has_ended = isinstance(update, CompletedUpdate | FailedUpdate)
                    if isinstance(update, CompletedUpdate):
                        # The scheduler hands on references: the outputs come straight from their worker's node.
                        yield replace(update, outputs=tuple(await asyncio.gather(*update.outputs)))
                    else:
                        yield update
            finally:
                if not has_ended:
                    call.cancel()
                    self._begin_to_end(call_id)

    def _begin_to_end(self, call_id: str) -> None:
        # In a context of its own: Ray Serve cancels what a request that is cancelled has called, and this call with it.
        task = asyncio.get_running_loop().create_task(self._end_call(call_id), context=Context())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_call(self, call_id: str) -> None:
        try:
            await self._handle.end_call.remote(call_id)
        except Exception as error:
            logger.warning("the scheduler was not told that a client has left: %r", error)

    async def cancel(self, request_id: str) -> bool:
        with translate_ray_errors():
            return bool(await self._handle.cancel.remote(request_id))

    async def get_catalogue(self, known_version: str | None, timeout_s: float) -> Catalogue:
        """Long-poll the models that take requests: return when they differ from `known_version`, or after `timeout_s`
        seconds."""
        with translate_ray_errors():
            found: Catalogue = await self._handle.get_catalogue.remote(known_version, timeout_s)
            return found

    async def get_health(self) -> dict[str, Any]:
        with translate_ray_errors():
            return dict(await self._handle.get_health.remote())


async def _flatten(stream: AsyncIterable[list[Update]]) -> AsyncIterator[Update]:
    async for batch in stream:
        for update in batch:
            yield update


async def _wait(answer: Awaitable[Update]) -> AsyncIterator[Update]:
    yield await answer


def make_scheduler_deployment(args: AppArgs) -> serve.Deployment:
    """The deployment with its devices reserved: bundle 0 for the replica itself, one bundle per worker."""
    gpus = _count_gpus_per_worker(args)
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


def _count_gpus_per_worker(args: AppArgs) -> float:
    return 1.0 if args.cluster.device == "cuda" else 0.0
