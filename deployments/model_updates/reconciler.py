"""Keeps the models of a running service as its configuration says: adds, drains and removes them.

A configuration that cannot work changes nothing. A newer one may come at any time, also while models are drained.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from deployments.assembly.profiles import add_models, load_served_tables
from deployments.config.app import AppArgs
from deployments.config.models import ModelArgs
from deployments.model_updates.catalogue import CataloguePublisher
from deployments.model_updates.change import KnownModel, build_known_model, find_refusals, plan_interim_placement
from deployments.model_updates.lora_changes import LoraChanges
from deployments.model_updates.lora_registry import LoraRegistry
from deployments.models.served import describe_lacks
from deployments.models.sources import find_model_source
from deployments.preparation.warm_up import plan_warm_up
from profiler import CostModel
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.model_changes import ModelChanges
from tridentserve.engine.live.warming.warm_up_runs import WarmUpOrder
from tridentserve.errors import ConfigError, TridentServeError
from tridentserve.plans import PlacementPlan
from tridentserve.scheduling.events import ModelRemoved

logger = logging.getLogger(__name__)


class ModelReconciler:
    """Brings the running models to the latest configuration. It lives in the Scheduler's event loop."""

    def __init__(
        self,
        args: AppArgs,
        changes: ModelChanges,
        times: CostModel,
        specs: Sequence[WorkerSpec],
        placement: PlacementPlan,
        fetch: Callable[[AppArgs], Awaitable[AppArgs]],
    ) -> None:
        """The service has been started with `args` and `placement`. `fetch` brings models of the hub to the nodes, and
        puts their folders into a configuration. Raises `ModelFolderError`."""
        self._in_force = self._wanted = args
        self._changes = changes
        self._times = times  # belongs to the scheduler's thread
        self._planning_times = times  # a snapshot replaces it before anything is planned
        self._specs = specs
        self._first_placement = placement
        self._fetch = fetch
        self._registry = LoraRegistry(args.loras_file)
        self.loras = LoraChanges(self._registry, changes, lambda: self._known, args.cache_dir, self._publish)
        self._known = {model.name: build_known_model(args, model, "serving") for model in args.models}
        # The names of models that return with other weights, and the sources of those that have host copies already.
        self._returning: list[str] = []
        self._preloaded: dict[str, ModelSource] = {}
        # Of models that have been added; each ends by itself.
        self._warm_ups: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        if any(model.drain for model in args.models):
            self._changed.set()
        # The reasons why the latest configuration is not in force; none when it is, or is on its way.
        self.problems: list[str] = []
        self.catalogue = CataloguePublisher()
        self._publish()
        self._task = asyncio.get_running_loop().create_task(self._reconcile())

    def reconcile_to(self, args: AppArgs) -> None:
        """Bring the service to these models; returns at once. The latest call counts."""
        self._wanted = args
        self._changed.set()

    def refuse(self, problems: Sequence[str]) -> None:
        """Report why the latest configuration cannot work. Everything stays as it is."""
        self.problems = list(problems)
        logger.error("the new configuration is refused, nothing changes: %s", "; ".join(problems))

    def describe(self) -> dict[str, Any]:
        """The state of each model and the problems of the latest configuration, as `GET /health` answers them."""
        returning = dict.fromkeys(self._returning, "loading")
        models = {name: known.state for name, known in self._known.items()}
        return {"models": {**returning, **models}, "problems": list(self.problems)}

    def stop(self) -> None:
        for task in (self._task, *self._warm_ups.values()):
            task.cancel()

    def _publish(self) -> None:
        """Publish the models that take requests, in the order of the configuration: the first is the default."""
        taken = (known for known in self._known.values() if known.is_open)
        self.catalogue.publish(
            [replace(self._registry.apply(known.served), is_warming=known.state == "warming") for known in taken]
        )

    async def _reconcile(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._apply(self._wanted)
            except Exception as error:
                await self._report_failure(error)

    async def _report_failure(self, error: Exception) -> None:
        self._returning = []
        await self._drop_preloaded(set(self._preloaded))
        if isinstance(error, TridentServeError):
            self.refuse(str(error).splitlines())
        else:  # a defect, or an error of Ray: the next configuration may work
            logger.error("a change of the models failed", exc_info=error)
            self.refuse([f"models: {type(error).__name__}: {error}"])

    async def _apply(self, args: AppArgs) -> None:
        args = await self._fetch(args)
        if problems := await asyncio.to_thread(find_refusals, args, self._in_force, self._planning_times.shares):
            self.refuse(problems)
            return
        await self._cover_models(args)
        self.problems = []
        wanted = {model.name: model for model in args.models}
        gone = [name for name in self._known if name not in wanted]
        replaced = [
            name for name, known in self._known.items() if name in wanted and known.is_replaced_by(wanted[name])
        ]
        new = [model for model in args.models if model.name not in self._known]
        await self._preload([wanted[name] for name in replaced], args)
        self._returning = replaced
        await self._prepare(new, args)
        leaving = [*gone, *replaced]
        for name in leaving:
            self._close(name)
        came = await self._admit(new, args, leaving)
        while leaving:
            if not await self._wait_until_drained(leaving[0], args.drain_timeout_s):
                return  # a newer configuration has come, which may want it back
            await self._remove(leaving.pop(0), args, leaving)
        back = [wanted[name] for name in replaced]
        await self._prepare(back, args)
        self._preloaded.clear()
        await self._admit(back if came else [*new, *back], args, [])
        await self._adjust(args)
        self._in_force = args
        self._known = {name: self._known[name] for name in wanted}
        self._returning = []
        self._publish()
        logger.info("the models are: %s", self.describe()["models"])

    async def _cover_models(self, args: AppArgs) -> None:
        """Have the cost model cover new models, in the scheduler's thread, to which it belongs; placements are planned
        with a snapshot of it."""
        tables = await asyncio.to_thread(load_served_tables, args)

        def extend() -> CostModel:
            add_models(self._times, args, tables)
            return self._times.take_snapshot()

        self._planning_times = await self._changes.call_in_core(extend)
        self._changes.set_memory(self._planning_times.build_memory_table())

    async def _preload(self, models: Sequence[ModelArgs], args: AppArgs) -> None:
        """Read the weights that will replace those of serving models, so that these stay if they cannot be read."""
        before = {model.name: _describe_weights(model) for model in self._in_force.models}
        wanted = {
            model.name: await asyncio.to_thread(find_model_source, model, args.cache_dir)
            for model in models
            if before.get(model.name) != _describe_weights(model)
        }
        await self._drop_preloaded({name for name, one in self._preloaded.items() if wanted.get(name) != one})
        for name in wanted.keys() - self._preloaded.keys():
            logger.info("reading what replaces %s", name)
            await self._changes.rehearse(wanted[name])
            self._preloaded[name] = wanted[name]

    async def _drop_preloaded(self, names: Collection[str]) -> None:
        for name in names:
            await self._changes.drop_rehearsed(self._preloaded.pop(name))

    async def _prepare(self, models: Sequence[ModelArgs], args: AppArgs) -> None:
        """Read the weights of models on all nodes. If those of one cannot be read, none of the models is added."""
        for model in models:
            self._known[model.name] = build_known_model(args, model, "loading")
        try:
            for model in models:
                logger.info("loading %s", model.name)
                if (lacks := describe_lacks(model)) is not None:
                    logger.warning(lacks)
                await self._changes.prepare(await asyncio.to_thread(find_model_source, model, args.cache_dir))
        except BaseException:
            for model in models:
                del self._known[model.name]
                await self._changes.discard(model.name)
            raise

    async def _admit(self, models: Sequence[ModelArgs], args: AppArgs, leaving: Sequence[str]) -> bool:
        """Accept requests for models from now on. The result is False when they have no room until others have left."""
        placement = self._plan_placement(args, leaving) if models else None
        if models and placement is None:
            return False
        orders = await asyncio.to_thread(plan_warm_up, args, self._planning_times) if models else ()
        orders_by_name = {order.model: order for order in orders}
        for model in models:
            await self._changes.add(self._known[model.name].make_added_event(placement))
            placement = None  # it holds them all
            order = orders_by_name.get(model.name)
            self._known[model.name].state = "serving" if order is None else "warming"
            if order is not None:
                self._warm_ups[model.name] = asyncio.create_task(self._warm_up(order))
        self._publish()
        return True

    async def _warm_up(self, order: WarmUpOrder) -> None:
        """Have workers run what they will be asked for of a model that takes requests already."""
        try:
            await self._changes.warm_up(order)
        except Exception:  # whatever it is, the model serves without
            logger.exception("%s is not warmed up", order.model)
        known = self._known.get(order.model)
        if known is not None and known.state == "warming":
            known.state = "serving"
            self._publish()

    def _close(self, name: str) -> None:
        known = self._known[name]
        if known.state != "draining":
            known.state, known.closed_s = "draining", time.monotonic()
            self._publish()
            self._changes.close(name)

    async def _wait_until_drained(self, name: str, timeout_s: float) -> bool:
        """Wait until a model has no requests, or for `timeout_s` seconds after its closing. The result is False when
        another configuration comes first."""
        left_s = max(0.0, self._known[name].closed_s + timeout_s - time.monotonic())
        ended = asyncio.ensure_future(self._changes.wait_until_drained(name))
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((ended, changed), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and not changed.done():
                logger.warning("%s still has requests after %g s: they are ended", name, timeout_s)
            return ended.done() or not changed.done()
        finally:
            ended.cancel()
            changed.cancel()

    async def _remove(self, name: str, args: AppArgs, leaving: Sequence[str]) -> None:
        """Remove a model. If the others have no room together, the placement in force stays until the last leaves."""
        self._known[name].state = "removing"
        await self._changes.remove(ModelRemoved(name, self._plan_placement(args, leaving)))
        del self._known[name]
        self._registry.forget(name)
        logger.info("%s has been removed", name)

    async def _adjust(self, args: AppArgs) -> None:
        """Close or reopen the models that stay, and give the scheduler their new settings."""
        before = self._in_force
        is_placed_anew = (args.placement, args.expected_load) != (before.placement, before.expected_load)
        placement = self._plan_placement(args, []) if is_placed_anew else None
        for model in args.models:
            old = self._known[model.name]
            known = self._known[model.name] = build_known_model(args, model, old.state)
            known.closed_s = old.closed_s
            if model.drain:
                self._close(model.name)
            elif placement is not None or not known.is_open or known != old:
                await self._changes.add(known.make_added_event(placement))
                placement = None
                if not known.is_open:
                    known.state = "serving"

    def _plan_placement(self, args: AppArgs, leaving: Sequence[str]) -> PlacementPlan | None:
        """A placement for the models of `args` and those that are leaving; None when they have no room together."""
        current = self._changes.placement or self._first_placement
        others: list[KnownModel] = [self._known[name] for name in leaving if name not in _collect_names(args)]
        try:
            return plan_interim_placement(args, others, self._planning_times, self._specs, current)
        except ConfigError:
            if others:
                return None
            raise


def _collect_names(args: AppArgs) -> set[str]:
    return {model.name for model in args.models}


def _describe_weights(model: ModelArgs) -> tuple[object, ...]:
    """The settings on which host copies depend."""
    return model.folder, model.tiny, model.formats
