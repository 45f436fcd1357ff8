"""Starts what the Scheduler deployment drives: workers in its placement group, the engine, the keeper of the models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group_table

from deployments.assembly.planning import hot_groups, make_scheduler, plan_placement, policy_of, worker_specs
from deployments.assembly.profiles import cost_model
from deployments.config.app import AppArgs
from deployments.model_updates.reconciler import ModelKeeper
from deployments.models.sources import model_source
from tridentserve.engine.live.engine import EngineOptions, LiveEngine
from tridentserve.engine.live.fleet import WorkerResources
from tridentserve.engine.live.messages import ModelSource, WorkerConfig
from tridentserve.errors import ConfigError

logger = logging.getLogger(__name__)

_MIB = 2**20


async def start(args: AppArgs, gpus_per_worker: float) -> tuple[LiveEngine, ModelKeeper]:
    """Returns when all workers can take plans. Raises `ConfigError` for what cannot work."""
    group = _placement_group(args)
    bundles, nodes = _bundles_by_node(group)
    specs = worker_specs(args, nodes)
    times = cost_model(args)
    policy = policy_of(args, times, specs)
    placement = plan_placement(args, times, specs, policy)
    logger.info(
        "policy %s, placement: %s", policy.name, {spec.worker_id: placement.describe(spec.worker_id) for spec in specs}
    )
    sources, (store, abandon) = await asyncio.gather(
        asyncio.to_thread(_model_sources, args), asyncio.to_thread(_start_store)
    )
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
            host_dir=args.replicas.host_dir or args.cache_dir / "host",
            fetch=args.replicas.fetch,
            block_bytes=args.replicas.block_mb * _MIB,
            max_groups=args.cluster.max_groups,
            hot_groups=groups,
        )
        for spec in specs
    ]
    engine = LiveEngine(
        make_scheduler(args, times, specs, policy, placement),
        configs,
        WorkerResources(args.cluster.cpus_per_worker, gpus_per_worker, group, bundles),
        abandon,
        EngineOptions(
            tick_s=args.dispatch.tick_ms / 1000,
            max_requests=args.max_queued_requests,
            max_result_age_s=args.max_result_age_s,
            decision_log=args.decision_log,
        ),
        times,
    )
    await engine.start()
    return engine, ModelKeeper(args, engine.models, times, specs, placement)


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
    return {model.name: model_source(model, args.cache_dir) for model in args.models}


def _start_store() -> tuple[Any, Callable[[str, int, int], None]]:
    """The store beside the scheduler in which workers form process groups, and how to speak for a lost worker there.
    It lives as long as the second, which keeps it."""
    from tridentserve.parallel import abandon, connect_store

    host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    store = connect_store(host, is_server=True)
    return store, partial(abandon, store)
