"""A service of this machine without its HTTP front: the scheduler and the live engine, as a configuration says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from deployments.assembly.planning import plan_placement, policy_of, worker_specs
from deployments.assembly.profiles import cost_model
from deployments.backend import wait_for_result
from deployments.config.app import AppArgs
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.engine import EngineOptions, LiveEngine
from tridentserve.engine.live.fleet import WorkerResources
from tridentserve.engine.live.messages import Fetch, ModelSource, WorkerConfig
from tridentserve.engine.live.updates import CompletedUpdate
from tridentserve.parallel import connect_store
from tridentserve.protocols import Dispatcher, Replanner
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling.scheduler import Scheduler

D = TypeVar("D", bound=Dispatcher)


@dataclass(frozen=True, slots=True)
class Service(Generic[D]):
    engine: LiveEngine
    dispatcher: D
    specs: list[WorkerSpec]

    async def ask(self, name: str, model: str, inputs: GenerationInputs) -> CompletedUpdate:
        """The result of a request. Raises the `TridentServeError` with which it failed."""
        spec = RequestSpec(name, model, inputs.shape, inputs.num_inference_steps, slo_s=600.0)
        return await wait_for_result(self.engine.generate(spec, inputs))


@asynccontextmanager
async def serving(
    values: dict[str, Any],
    folder: Path,
    host_dir: Path,
    wrap: Callable[[Dispatcher], D],
    replanner: Replanner | None = None,
    fetch: Fetch = "auto",
) -> AsyncIterator[Service[D]]:
    """A service with these `args`, whose models are all the checkpoint in `folder`. `wrap`: of its dispatcher."""
    args = AppArgs.model_validate(values)
    specs, times = worker_specs(args, ["node"] * args.cluster.workers_per_node), cost_model(args)
    policy = policy_of(args, times, specs)
    placement = plan_placement(args, times, specs, policy)
    dispatcher = wrap(policy.dispatcher)
    scheduler = Scheduler(specs, placement, times, dispatcher, replanner=replanner)
    store = connect_store(is_server=True)
    configs = [
        WorkerConfig(
            spec=spec,
            incarnation=0,
            label=placement.describe(spec.worker_id),
            replicas=placement.replicas[spec.worker_id],
            sources={model.name: ModelSource(model.name, folder) for model in args.models},
            store_host="127.0.0.1",
            store_port=store.port,
            handoff_bytes=args.handoff.capacity_mb << 20,
            max_groups=args.cluster.max_groups,
            host_dir=host_dir,
            fetch=fetch,
        )
        for spec in specs
    ]

    def abandon(group: str, rank: int, plan_id: int, store: Any = store) -> None:
        """No groups here; the store lives as long as this."""

    engine = LiveEngine(scheduler, configs, WorkerResources(0.1), abandon, EngineOptions(), times)
    await engine.start()
    try:
        yield Service(engine, dispatcher, specs)
    finally:
        await engine.stop()
