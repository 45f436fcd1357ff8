"""Starts the parts of the Scheduler deployment: workers in its placement group, the engine and the model reconciler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group_table

from deployments.assembly.expected_load import assume_load
from deployments.assembly.options import make_service_options
from deployments.assembly.planning import assemble_service, find_hot_width, list_workers
from deployments.assembly.service_times import make_service_times
from deployments.assembly.workers import make_worker_configs
from deployments.config.app import AppArgs
from deployments.model_updates.reconciler import ModelReconciler
from deployments.models.hub_models import HubModels
from deployments.models.served import describe_lacks
from deployments.models.sources import find_model_source
from deployments.preparation.profiling import measure_unprofiled
from deployments.preparation.start_news import open_start_news
from deployments.preparation.warm_up import plan_warm_up
from deployments.preparation.worker_memory import settle_memory
from deployments.preparation.worker_places import order_bundles
from deployments.preparation.worker_seat import WorkerSeats
from placement.shares import describe_shares
from tridentserve.engine.live.engine import LiveEngine
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.spawning.spawner import ActorSpawner
from tridentserve.errors import ConfigError

logger = logging.getLogger(__name__)


async def settle_args(args: AppArgs, gpus_per_worker: float) -> AppArgs:
    """The configuration with what only the nodes know. Raises `ConfigError`."""
    return await settle_memory(args, _list_seats(args, gpus_per_worker, _require_placement_group(args)))


async def start_engine(args: AppArgs, gpus_per_worker: float, prefix: str = "") -> tuple[LiveEngine, ModelReconciler]:
    """Start the engine; returns when all workers can take plans. Their ids begin with `prefix`. Raises `ConfigError`
    for a configuration that cannot work. Models without a profile are measured before, and workers warmed up after
    their start."""
    group = _require_placement_group(args)
    bundles, nodes = _list_bundles(group)
    seats = WorkerSeats(group, bundles, args.cluster.cpus_per_worker, gpus_per_worker)
    bundles = await order_bundles(seats, nodes, args.cluster.device)
    hub = HubModels(group)
    args = await hub.fetch(args)
    specs = list_workers(args, nodes, prefix)
    await measure_unprofiled(args, _list_seats(args, gpus_per_worker, group))
    sources, times = await asyncio.to_thread(_find_model_sources, args), make_service_times(args, specs)
    for load in assume_load(args, times):
        expected = load.model, load.shape, load.num_inference_steps
        logger.info("expected_load has no entry of %s: requests of %s in %d steps are expected", *expected)
    for lacks in filter(None, map(describe_lacks, args.models)):
        logger.warning(lacks)
    for line in describe_shares(times):
        logger.info(line)
    planners, options = assemble_service(args, times, specs), make_service_options(args)
    placement = planners.placement
    logger.info(
        "policy %s, placement: %s",
        planners.policy.name,
        {spec.worker_id: placement.describe(spec.worker_id) for spec in specs},
    )
    store, abandon = await asyncio.to_thread(_start_store)
    at, hot_width = (store.host, store.port), find_hot_width(args, times)
    warm_up = await asyncio.to_thread(plan_warm_up, args, times)
    engine = LiveEngine(
        planners.scheduler,
        make_worker_configs(specs, placement, sources, times.shares, at, options.worker, hot_width),
        ActorSpawner(options.worker.num_cpus, gpus_per_worker, group, bundles, hub.bring),
        abandon,
        options.engine,
        times.build_memory_table(),
        warm_up,
    )
    if warm_up and not prefix:  # of several cells, nobody asks for news
        with open_start_news("warming") as news:
            await engine.start(news.tell.remote)
    else:
        await engine.start()
    return engine, ModelReconciler(args, engine.models, times, specs, placement, hub.fetch)


def _require_placement_group(args: AppArgs) -> PlacementGroup:
    group = ray.util.get_current_placement_group()
    needed = 1 + args.cluster.num_workers
    if group is None or group.bundle_count != needed:
        raise ConfigError(
            f"the Scheduler needs a placement group of {needed} bundles (one for itself, one per worker); "
            "do not override placement_group_bundles in the YAML"
        )
    return group


def _list_seats(args: AppArgs, gpus_per_worker: float, group: PlacementGroup) -> WorkerSeats:
    """The first worker of each node."""
    bundles, nodes = _list_bundles(group)
    first = {node: bundle for bundle, node in reversed(list(zip(bundles, nodes, strict=True)))}
    return WorkerSeats(group, tuple(sorted(first.values())), args.cluster.cpus_per_worker, gpus_per_worker)


def _list_bundles(group: PlacementGroup) -> tuple[tuple[int, ...], list[str]]:
    """The bundles of the workers, node after node, and the node of each. PACK promises no order across nodes."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    order = list(dict.fromkeys(nodes[index] for index in range(1, group.bundle_count)))
    bundles = sorted(range(1, group.bundle_count), key=lambda index: (order.index(nodes[index]), index))
    return tuple(bundles), [nodes[index] for index in bundles]


def _find_model_sources(args: AppArgs) -> dict[str, ModelSource]:
    return {model.name: find_model_source(model, args.cache_dir) for model in args.models}


def _start_store() -> tuple[Any, Callable[[str, int, int], None]]:
    """The store in which workers form process groups, and a function that answers there for a lost worker. The function
    keeps the store alive."""
    from tridentserve.parallel import abandon, connect_store

    host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    store = connect_store(host, is_server=True)
    return store, partial(abandon, store)
