"""The Scheduler deployment: exactly one replica, which owns the workers and drives them by the pure scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group_table

from deployments.config import AppArgs
from deployments.planning import hot_groups, make_scheduler, plan_placement, policy_of, worker_specs
from deployments.profiles import cost_model
from tridentserve.engine.live.engine import EngineOptions, LiveEngine
from tridentserve.engine.live.fleet import WorkerResources
from tridentserve.engine.live.messages import ModelSource, WorkerConfig
from tridentserve.engine.live.updates import Update
from tridentserve.errors import ConfigError, WorkerError
from tridentserve.requests import GenerationInputs, RequestSpec

logger = logging.getLogger(__name__)

_MIB = 2**20


class Scheduler:
    """The event loop around the pure core. Its constructor returns when all workers can take plans."""

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._args = args
        self._engine: LiveEngine | None = None
        group = _placement_group(args)
        bundles, nodes = _bundles_by_node(group)
        specs = worker_specs(args, nodes)
        times = cost_model(args)
        policy = policy_of(args, times, specs)
        placement = plan_placement(args, times, specs, policy)
        logger.info(
            "policy %s, placement: %s",
            policy.name,
            {spec.worker_id: placement.describe(spec.worker_id) for spec in specs},
        )
        sources = await asyncio.to_thread(_model_sources, args)
        store, abandon = await asyncio.to_thread(_start_store)
        groups = hot_groups(args, times, specs, placement)
        configs = [
            WorkerConfig(
                spec=spec,
                incarnation=0,
                label=placement.describe(spec.worker_id),
                replicas=placement.replicas[spec.worker_id],
                sources=sources,
                store_host=store.host,
                store_port=store.port,
                torch_device=args.cluster.device,
                num_threads=args.cluster.cpu_threads,
                handoff_bytes=args.handoff.capacity_mb * _MIB,
                handoff_transport=args.handoff.transport,
                host_dir=args.cache_dir / "host",
                max_groups=args.cluster.max_groups,
                hot_groups=groups,
            )
            for spec in specs
        ]
        self._engine = LiveEngine(
            make_scheduler(args, times, specs, policy, placement),
            configs,
            WorkerResources(args.cluster.cpus_per_worker, _gpus_per_worker(args), group, bundles),
            abandon,
            EngineOptions(
                tick_s=args.dispatch.tick_ms / 1000,
                max_requests=args.max_queued_requests,
                max_result_age_s=args.max_result_age_s,
                decision_log=args.decision_log,
            ),
            times,
        )
        await self._engine.start()

    async def generate(self, spec: RequestSpec, inputs: GenerationInputs) -> AsyncIterator[Update]:
        """See `deployments.backend.Backend`; pictures come as references, not as bytes."""
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
        return {"status": status, "workers": len(alive), "workers_total": total, "placement": placement}

    def check_health(self) -> None:
        """For Ray Serve: only that the scheduler's thread is alive. Waiting for workers here would let the loss of
        one take the application down."""
        if self._engine is not None and not self._engine.healthy:
            raise WorkerError("the scheduler's thread has ended")

    def _started(self) -> LiveEngine:
        if self._engine is None:
            raise WorkerError("the service is starting")
        return self._engine


def scheduler_deployment(args: AppArgs) -> serve.Deployment:
    """The deployment with its devices reserved: bundle 0 for the replica itself, one bundle per worker."""
    gpus = _gpus_per_worker(args)
    worker = {"CPU": args.cluster.cpus_per_worker, **({"GPU": gpus} if gpus else {})}
    return serve.deployment(
        name="Scheduler",
        num_replicas=1,
        max_ongoing_requests=100_000,  # the queue is the engine's: it refuses beyond `max_queued_requests`
        ray_actor_options={"num_cpus": _REPLICA_CPUS},
        placement_group_bundles=[{"CPU": _REPLICA_CPUS}, *[worker] * args.cluster.num_workers],
        placement_group_strategy="PACK",
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=10.0,
    )(Scheduler)


_REPLICA_CPUS = 0.1


def _gpus_per_worker(args: AppArgs) -> float:
    return 1.0 if args.cluster.device == "cuda" else 0.0


def _placement_group(args: AppArgs) -> PlacementGroup:
    group = ray.util.get_current_placement_group()
    needed = 1 + args.cluster.num_workers
    if group is None or group.bundle_count != needed:
        raise ConfigError(
            f"the Scheduler needs a placement group of {needed} bundles (one for itself, one per worker); "
            "do not override placement_group_bundles in the YAML"
        )
    return group


def _bundles_by_node(group: PlacementGroup) -> tuple[tuple[int, ...], list[str]]:
    """The bundles of the workers, node after node, and the node of each. PACK promises no order across nodes."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    order = list(dict.fromkeys(nodes[index] for index in range(1, group.bundle_count)))
    bundles = sorted(range(1, group.bundle_count), key=lambda index: (order.index(nodes[index]), index))
    return tuple(bundles), [nodes[index] for index in bundles]


def _model_sources(args: AppArgs) -> dict[str, ModelSource]:
    """Where each model lies; tiny ones are made on first use. Takes seconds: torch is imported here, not before."""
    from tridentserve.pipelines.tiny import ensure_tiny

    folders: dict[str, Path] = {}
    for model in args.models:
        if model.tiny is not None:
            folders[model.name] = ensure_tiny(model.tiny, args.cache_dir)
        elif model.path is not None:
            folders[model.name] = model.path
    return {model.name: ModelSource(model.name, folders[model.name], model.dtype) for model in args.models}


def _start_store() -> tuple[Any, Callable[[str, int, int], None]]:
    """The store beside the scheduler in which workers form process groups, and how to speak for a lost worker there.
    It lives as long as the second, which keeps it."""
    from tridentserve.parallel import abandon, connect_store

    host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    store = connect_store(host, is_server=True)
    return store, partial(abandon, store)
