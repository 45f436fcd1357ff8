"""Models of the hub in a configuration: each is fetched to the nodes that need it, and its folder takes the place of
its id. From then on it is a model folder as any other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from deployments.config.app import AppArgs
from deployments.replica_logs import prepare_logs
from deployments.validation.args import check_parsed_args
from tridentserve.errors import ConfigError, ModelFolderError
from tridentserve.hub.cached import HubSnapshot
from tridentserve.hub.hub_model import HubModel

# A setting of its own has a fetch run in a process of its own, which has imported nothing that turns the hub off
# (`tridentserve.pipelines`). Bars would fill the log.
_ENVIRONMENT = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}

logger = logging.getLogger(__name__)


class HubModels:
    """The models that a service has fetched. A branch is resolved to its commit once, and stays there until the service
    ends."""

    def __init__(self, group: PlacementGroup) -> None:
        """`group`: Ray's placement group of the workers, which may come to other nodes when one is lost."""
        self._group = group
        self._snapshots: dict[HubModel, HubSnapshot] = {}

    async def fetch(self, args: AppArgs) -> AppArgs:
        """The configuration with model folders in the place of the hub's ids, once they are on this node and on all
        nodes of the workers. Raises `ModelFolderError`, and `ConfigError` when the configuration does not fit what was
        fetched."""
        wanted = {model.hub_model: None for model in args.models if model.hub_model is not None}
        if not wanted:
            return args
        for model in wanted:
            if model not in self._snapshots:
                self._snapshots[model] = await self._fetch_model(model)
        fetched = name_folders(args, {model: snapshot.folder for model, snapshot in self._snapshots.items()})
        if problems := await asyncio.to_thread(check_parsed_args, fetched):
            raise ConfigError("\n".join(problems))
        return fetched

    async def bring(self, bundle: int) -> None:
        """Fetch all of them to the node of a bundle of the group, which may be a new one. Raises `ModelFolderError`."""
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        where = f"the node of bundle {bundle}"
        for snapshot in list(self._snapshots.values()):
            await _run_fetch(place, where, snapshot.model, snapshot.cache)

    async def _fetch_model(self, model: HubModel) -> HubSnapshot:
        """Fetch a model to this node, and then at the same commit to the others, into a directory of the same path."""
        here = ray.get_runtime_context().get_node_id()
        snapshot = await _run_fetch_on(here, model, None)
        others = set(placement_group_table(self._group)["bundles_to_node_id"].values()) - {here}
        await asyncio.gather(*(_run_fetch_on(node, snapshot.model, snapshot.cache) for node in others))
        return snapshot


def name_folders(args: AppArgs, folders: Mapping[HubModel, Path]) -> AppArgs:
    """The configuration with these folders in the place of models of the hub."""
    models = [
        model
        if model.hub_model is None
        else model.model_copy(update={"path": folders[model.hub_model], "revision": None})
        for model in args.models
    ]
    return args.model_copy(update={"models": models})


async def _run_fetch_on(node_id: str, model: HubModel, cache: Path | None) -> HubSnapshot:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return await _run_fetch(strategy, f"the node {node_id}", model, cache)


async def _run_fetch(place: Any, where: str, model: HubModel, cache: Path | None) -> HubSnapshot:
    """Fetch a model where Ray's strategy `place` says."""
    task = ray.remote(_fetch_here).options(
        num_cpus=0, max_retries=2, scheduling_strategy=place, runtime_env={"env_vars": _ENVIRONMENT}
    )
    try:
        fetched: HubSnapshot = await task.remote(model, cache)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ModelFolderError):
            raise ModelFolderError(f"{error.cause} (on {where})") from None
        raise
    return fetched


def _fetch_here(model: HubModel, cache: Path | None) -> HubSnapshot:
    """Fetch a model to the node where this runs; one process of the node at a time does."""
    from tridentserve.hub.fetching import fetch_to_cache

    prepare_logs()
    return fetch_to_cache(model, cache)
