"""The Scheduler deployment: exactly one replica, which owns the workers and runs the pure scheduler's plans on them.
Where there are several cells each has such a deployment. Other replicas reach it through `RemoteBackend`, and their
requests come over channels (`client_calls`).

The engine is imported when the replica starts: the processes that only have a client do not need it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.util import get_node_ip_address

from deployments.assembly.cell_args import name_workers, take_cell
from deployments.config.app import AppArgs
from deployments.config.live import apply_user_config, name_scheduler
from deployments.explaining.explainer import Explainer
from deployments.model_updates.catalogue import Catalogue
from deployments.replica_logs import prepare_logs
from deployments.schemas.image_limits import MAX_HELD_BYTES, ImageBudget
from deployments.serve.client_calls import ClientGate
from deployments.serve.gpu_shortage import count_gpus_per_worker
from deployments.serve.user_config_follower import UserConfigFollower
from tridentserve.cells.summary import CellSummary
from tridentserve.engine.live.channels.channel import ChannelAddress
from tridentserve.engine.live.channels.opening import ChannelListener, listen
from tridentserve.engine.live.updates import FailedUpdate, Update
from tridentserve.errors import ConfigError, OverloadedError, WorkerError
from tridentserve.models.lora_files import LoraFile
from tridentserve.process.long_lived import spare_long_lived
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling.events import Reject
from tridentserve.scheduling.prediction.predictor import Quote
from tridentserve.scheduling.watching.cluster_state import ClusterState

if TYPE_CHECKING:
    from deployments.model_updates.reconciler import ModelReconciler
    from tridentserve.engine.live.engine import LiveEngine

# Every waiting request takes one place in a replica of Api or Videos; the bound that counts is the scheduler's.
MAX_ONGOING_REQUESTS = 10_000

logger = logging.getLogger(__name__)


class SchedulerDeployment:
    """The event loop around the pure core. Ray Serve calls `reconfigure` before the first request (it returns when all
    workers can take plans) and whenever the `user_config` has changed."""

    def __init__(self, args: AppArgs, cell: int = 0, first: Any = None) -> None:
        """`args` is the configuration of the whole service. `first` is the handle of the deployment of cell 0, for
        those of the others."""
        prepare_logs()
        self._args = args
        self._cell = cell
        self._num_workers = take_cell(args, cell).cluster.num_workers
        self._user_config: Any = None
        self._follower = UserConfigFollower(first) if first is not None else None
        self._engine: LiveEngine | None = None
        self._reconciler: ModelReconciler | None = None
        self._explainer: Explainer | None = None
        self._images = ImageBudget(MAX_HELD_BYTES)
        self._gate = ClientGate(self, self._args.scheduler.orphan_s)
        self._listener: ChannelListener | None = None

    async def reconfigure(self, user_config: Any) -> None:
        """Start the service, or bring the running service to other models. A running service never raises here, because
        Ray Serve would replace the replica and all workers with it; and it returns at once, because no request reaches
        the replica meanwhile."""
        self._user_config = user_config
        if self._reconciler is not None:
            self._change(user_config)
            return
        from deployments.serve.start import settle_args, start_engine

        if self._follower is not None:
            user_config = await self._follower.fetch(user_config)
        if self._args.scheduler.cells == 1:  # which has all nodes
            self._args = await settle_args(self._args, count_gpus_per_worker(self._args))
        args = self._take_cell(user_config)
        workers = name_workers(self._args, self._cell)
        self._engine, self._reconciler = await start_engine(args, count_gpus_per_worker(args), workers)
        self._explainer = Explainer(args, self._engine.record_decisions)
        host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
        self._listener = await listen(host, self._gate.serve)
        if self._follower is not None:
            self._follower.follow(user_config, self._change)
        spare_long_lived()

    def _change(self, user_config: Any) -> None:
        """Bring the running service to other models."""
        assert self._reconciler is not None
        try:
            self._reconciler.reconcile_to(self._take_cell(user_config))
        except ConfigError as error:
            self._reconciler.refuse(str(error).splitlines())

    def _take_cell(self, user_config: Any) -> AppArgs:
        return take_cell(apply_user_config(self._args, user_config), self._cell)

    async def get_user_config(self) -> Any:
        """The latest `user_config`, for the deployments of the other cells."""
        return self._user_config

    async def get_catalogue(self, known_version: str | None, timeout_s: float) -> Catalogue:
        """Long-poll the models that take requests: return when they differ from `known_version`, or after `timeout_s`
        seconds."""
        return await self._require_reconciler().catalogue.wait_for_change(known_version, timeout_s)

    async def add_lora(self, model: str, name: str, path: str) -> LoraFile:
        """See `Backend`."""
        return await self._require_reconciler().loras.add(model, name, path)

    async def remove_lora(self, model: str, name: str) -> None:
        """See `Backend`."""
        self._require_reconciler().loras.remove(model, name)

    async def get_address(self) -> ChannelAddress:
        """The place where this replica takes requests (see `ClientCalls`)."""
        if self._listener is None:
            raise WorkerError("the service is starting")
        return self._listener.address

    async def take_references(self, call_id: str) -> list[Any]:
        """Ray's references to the outputs of a call that has ended."""
        return self._gate.take_references(call_id)

    async def __del__(self) -> None:
        """Ray Serve calls it when the replica ends in order. It knows nothing of requests that come over channels."""
        await self._gate.wait_until_idle()

    async def generate_in_batches(
        self, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool = True
    ) -> AsyncGenerator[list[Update], None]:
        """See `LiveEngine`. A request whose images have no room beside those of the others is refused."""
        if not self._images.has_room(inputs.files):
            message = "the images of unfinished requests take all their room, try again later"
            yield [FailedUpdate(spec.request_id, OverloadedError.code, message)]
            return
        with self._images.hold(inputs.files):
            engine = self._require_engine()
            async with aclosing(engine.generate_in_batches(spec, inputs, with_progress)) as batches:
                async for batch in batches:
                    yield batch

    def has_request(self, request_id: str) -> bool:
        """See `LiveEngine`."""
        return self._require_engine().has_request(request_id)

    def cancel(self, request_id: str) -> bool:
        """See `LiveEngine`."""
        return self._require_engine().cancel(request_id)

    async def quote(self, specs: Sequence[RequestSpec]) -> list[Quote | Reject | None]:
        """See `LiveEngine`."""
        return await self._require_engine().quote(specs)

    async def summarize_load(self) -> CellSummary:
        """See `LiveEngine`. Models that are being removed are left out, as they take no new requests."""
        summary = await self._require_engine().summarize_load()
        taken = {model.name for model in self._reconciler.catalogue.latest.models} if self._reconciler else set()
        return CellSummary({model: load for model, load in summary.models.items() if model in taken})

    async def explain(self, request_id: str) -> dict[str, Any]:
        """See `deployments.explaining.explainer.Explainer`."""
        if self._explainer is None:
            raise WorkerError("the service is starting")
        return await self._explainer.explain(request_id)

    async def describe_cluster(self) -> ClusterState:
        """See `LiveEngine`."""
        return await self._require_engine().describe_cluster()

    async def get_health(self) -> dict[str, Any]:
        engine, total = self._require_engine(), self._num_workers
        alive, warming = engine.list_live_workers(), dict(engine.warming)
        is_whole = len(alive) == total and not engine.aside
        status = "ready" if is_whole else "degraded" if alive else "warming" if warming else "starting"
        models = self._reconciler.describe() if self._reconciler is not None else {}
        health = {"status": status, "workers": len(alive), "workers_total": total, "placement": engine.placement}
        under_way = {"warming": warming, "warming_models": dict(engine.warming_models), "aside": dict(engine.aside)}
        return {**health, **models, **{key: told for key, told in under_way.items() if told}}

    def check_health(self) -> None:
        """Raises when the scheduler's thread has ended. If it also asked for workers, the loss of one would take the
        application down."""
        if self._engine is not None and not self._engine.healthy:
            raise WorkerError("the scheduler's thread has ended")

    def _require_reconciler(self) -> ModelReconciler:
        if self._reconciler is None:
            raise WorkerError("the service is starting")
        return self._reconciler

    def _require_engine(self) -> LiveEngine:
        if self._engine is None:
            raise WorkerError("the service is starting")
        return self._engine


def make_scheduler_deployment(args: AppArgs, cell: int = 0) -> serve.Deployment:
    """The deployment of a cell with its devices reserved: bundle 0 for the replica itself, one bundle per worker. PACK
    fills whole nodes with them where these are free."""
    gpus, cluster = count_gpus_per_worker(args), take_cell(args, cell).cluster
    worker = {"CPU": cluster.cpus_per_worker, **({"GPU": gpus} if gpus else {}), **cluster.resources}
    return serve.deployment(
        name=name_scheduler(cell),
        num_replicas=1,
        max_ongoing_requests=100_000,  # the queue is the engine's: it refuses beyond `max_queued_requests`
        ray_actor_options={"num_cpus": _REPLICA_CPUS},
        placement_group_bundles=[{"CPU": _REPLICA_CPUS}, *[worker] * cluster.num_workers],
        placement_group_strategy="PACK",
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=10.0,
        user_config={},  # without one, Ray Serve would not call `reconfigure`
    )(SchedulerDeployment)


_REPLICA_CPUS = 0.1
