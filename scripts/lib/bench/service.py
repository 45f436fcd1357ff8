"""A service of this machine without its HTTP front: the scheduler and the live engine, as a configuration says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray

from deployments.assembly.options import make_service_options
from deployments.assembly.planning import assemble_service, list_workers
from deployments.assembly.service_times import make_service_times
from deployments.assembly.workers import make_worker_configs
from deployments.backend import wait_for_result
from deployments.config.app import AppArgs
from dispatch.policies import Policy
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.engine import LiveEngine
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.spawning.spawner import ActorSpawner, Spawner
from tridentserve.engine.live.updates import CompletedUpdate
from tridentserve.engine.options import Fetch
from tridentserve.parallel import abandon, connect_store
from tridentserve.protocols import Dispatcher, Replanner
from tridentserve.requests import GenerationInputs, RequestSpec

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
async def run_service(
    values: dict[str, Any],
    folder: Path,
    host_dir: Path,
    wrap: Callable[[Dispatcher], D],
    replanner: Replanner | None = None,
    fetch: Fetch | None = None,
    choose_spawner: Callable[[ActorSpawner], Spawner] = lambda spawner: spawner,
) -> AsyncIterator[Service[D]]:
    """A service with these `args`, whose models are all the model folder `folder`. `wrap`: of its dispatcher;
    `choose_spawner`: of the way in which its workers are started."""
    args = AppArgs.model_validate({**values, "replicas": {"host_dir": host_dir} | ({"fetch": fetch} if fetch else {})})
    options = make_service_options(args)
    nodes = [ray.get_runtime_context().get_node_id()] * args.cluster.workers_per_node
    specs, times = list_workers(args, nodes), make_service_times(args)
    wrapped: list[D] = []

    def wrap_policy(policy: Policy) -> Policy:
        wrapped.append(wrap(policy.dispatcher))
        return replace(policy, dispatcher=wrapped[0])

    planners = assemble_service(args, times, specs, alter=wrap_policy, replanner=replanner)
    store = connect_store(is_server=True)
    sources = {model.name: ModelSource(model.name, folder) for model in args.models}
    configs = make_worker_configs(
        specs, planners.placement, sources, times.shares, ("127.0.0.1", store.port), options.worker
    )

    engine = LiveEngine(
        planners.scheduler,
        configs,
        choose_spawner(ActorSpawner(options.worker.num_cpus)),
        partial(abandon, store),
        options.engine,
        times.build_memory_table(),
    )
    await engine.start()
    try:
        yield Service(engine, wrapped[0], specs)
    finally:
        await engine.stop()
