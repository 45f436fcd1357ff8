"""Keeps the models of a running service as its configuration says: adds, drains and removes them.

A configuration that cannot work changes nothing. A newer one may come at any time, also while models are drained.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

from deployments.assembly.profiles import add_models
from deployments.config.app import AppArgs, ModelArgs
from deployments.model_updates.catalogue import CataloguePublisher
from deployments.model_updates.change import KnownModel, interim_placement, known_model, refusals
from deployments.models.sources import model_source
from profiler import CostModel
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.model_changes import ModelChanges
from tridentserve.errors import ConfigError, TridentServeError
from tridentserve.plans import PlacementPlan
from tridentserve.scheduling.events import ModelRemoved

logger = logging.getLogger(__name__)


class ModelKeeper:
    """Lives in the Scheduler's event loop. `problems`: why the latest configuration is not in force; none when it is,
    or is on its way."""

    def __init__(
        self,
        args: AppArgs,
        changes: ModelChanges,
        times: CostModel,
        specs: Sequence[WorkerSpec],
        placement: PlacementPlan,
    ) -> None:
        """The service has been started with `args` and `placement`. Raises `CheckpointError`."""
        self._in_force = self._wanted = args
        self._changes = changes
        self._times = times
        self._specs = specs
        self._first_placement = placement
        self._known = {model.name: known_model(args, model, "serving") for model in args.models}
        # Models that are removed for others of the same name, and the sources of those, of which there are host copies.
        self._returning: list[str] = []
        self._rehearsed: dict[str, ModelSource] = {}
        self._news = asyncio.Event()
        if any(model.drain for model in args.models):
            self._news.set()
        self.problems: list[str] = []
        self.catalogue = CataloguePublisher()
        self._publish()
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def want(self, args: AppArgs) -> None:
        """Bring the service to these models; returns at once. The latest word counts."""
        self._wanted = args
        self._news.set()

    def refuse(self, problems: Sequence[str]) -> None:
        """The latest configuration cannot work: everything stays as it is."""
        self.problems = list(problems)
        logger.error("the new configuration is refused, nothing changes: %s", "; ".join(problems))

    def state(self) -> dict[str, Any]:
        """For people: where each model stands, and what is wrong with the latest configuration."""
        returning = dict.fromkeys(self._returning, "loading")
        models = {name: known.state for name, known in self._known.items()}
        return {"models": {**returning, **models}, "problems": list(self.problems)}

    def stop(self) -> None:
        self._task.cancel()

    def _publish(self) -> None:
        """The models that take requests, in the order of the configuration: the first is the default."""
        self.catalogue.publish([known.served for known in self._known.values() if known.state == "serving"])

    async def _keep(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._bring_about(self._wanted)
            except Exception as error:
                await self._failed(error)

    async def _failed(self, error: Exception) -> None:
        self._returning = []
        await self._drop_rehearsed(set(self._rehearsed))
        if isinstance(error, TridentServeError):
            self.refuse(str(error).splitlines())
        else:  # a defect, or Ray's: the next configuration may do better
            logger.error("a change of the models failed", exc_info=error)
            self.refuse([f"models: {type(error).__name__}: {error}"])

    async def _bring_about(self, args: AppArgs) -> None:
        if problems := await asyncio.to_thread(refusals, args, self._in_force):
            self.refuse(problems)
            return
        await asyncio.to_thread(add_models, self._times, args)
        self.problems = []
        wanted = {model.name: model for model in args.models}
        gone = [name for name in self._known if name not in wanted]
        replaced = [
            name for name, known in self._known.items() if name in wanted and known.is_replaced_by(wanted[name])
        ]
        new = [model for model in args.models if model.name not in self._known]
        await self._rehearse([wanted[name] for name in replaced], args)
        self._returning = replaced
        await self._prepare(new, args)
        leaving = [*gone, *replaced]
        for name in leaving:
            self._close(name)
        came = await self._admit(new, args, leaving)
        while leaving:
            if not await self._drained(leaving[0], args.drain_timeout_s):
                return  # a newer configuration has come, which may want it back
            await self._remove(leaving.pop(0), args, leaving)
        back = [wanted[name] for name in replaced]
        await self._prepare(back, args)
        self._rehearsed.clear()
        await self._admit(back if came else [*new, *back], args, [])
        await self._adjust(args)
        self._in_force = args
        self._known = {name: self._known[name] for name in wanted}
        self._returning = []
        self._publish()
        logger.info("the models are: %s", self.state()["models"])

    async def _rehearse(self, models: Sequence[ModelArgs], args: AppArgs) -> None:
        """Read what is to replace models that serve, so that these stay if it cannot be read."""
        before = {model.name: _weights(model) for model in self._in_force.models}
        wanted = {
            model.name: await asyncio.to_thread(model_source, model, args.cache_dir)
            for model in models
            if before.get(model.name) != _weights(model)
        }
        await self._drop_rehearsed({name for name, one in self._rehearsed.items() if wanted.get(name) != one})
        for name in wanted.keys() - self._rehearsed.keys():
            logger.info("reading what replaces %s", name)
            await self._changes.rehearse(wanted[name])
            self._rehearsed[name] = wanted[name]

    async def _drop_rehearsed(self, names: Collection[str]) -> None:
        for name in names:
            await self._changes.drop_rehearsed(self._rehearsed.pop(name))

    async def _prepare(self, models: Sequence[ModelArgs], args: AppArgs) -> None:
        """Have the weights of models at hand on all nodes; if one cannot be read, none of them."""
        for model in models:
            self._known[model.name] = known_model(args, model, "loading")
        try:
            for model in models:
                logger.info("loading %s", model.name)
                await self._changes.prepare(await asyncio.to_thread(model_source, model, args.cache_dir))
        except BaseException:
            for model in models:
                del self._known[model.name]
                await self._changes.discard(model.name)
            raise

    async def _admit(self, models: Sequence[ModelArgs], args: AppArgs, leaving: Sequence[str]) -> bool:
        """Take requests of models from now on. False where there is no room for them before others have left."""
        placement = self._placement(args, leaving) if models else None
        if models and placement is None:
            return False
        for model in models:
            await self._changes.add(self._known[model.name].added(placement))
            self._known[model.name].state = "serving"
            placement = None  # it holds them all
        self._publish()
        return True

    def _close(self, name: str) -> None:
        known = self._known[name]
        if known.state != "draining":
            known.state, known.closed_s = "draining", time.monotonic()
            self._publish()
            self._changes.close(name)

    async def _drained(self, name: str, timeout_s: float) -> bool:
        """Wait until a model has no requests, or may have them no longer. False when there is other news first."""
        left_s = max(0.0, self._known[name].closed_s + timeout_s - time.monotonic())
        ended = asyncio.ensure_future(self._changes.drained(name))
        news = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait((ended, news), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and not news.done():
                logger.warning("%s still has requests after %g s: they are ended", name, timeout_s)
            return ended.done() or not news.done()
        finally:
            ended.cancel()
            news.cancel()

    async def _remove(self, name: str, args: AppArgs, leaving: Sequence[str]) -> None:
        """End a model. Without a placement for the others the one in force stays, until the last one leaves."""
        self._known[name].state = "removing"
        await self._changes.remove(ModelRemoved(name, self._placement(args, leaving)))
        del self._known[name]
        logger.info("%s has been removed", name)

    async def _adjust(self, args: AppArgs) -> None:
        """Models that stay: close them or open them again, and tell the scheduler of other settings."""
        before = self._in_force
        is_placed_anew = (args.placement, args.expected_load) != (before.placement, before.expected_load)
        placement = self._placement(args, []) if is_placed_anew else None
        for model in args.models:
            old = self._known[model.name]
            known = self._known[model.name] = known_model(args, model, old.state)
            known.closed_s = old.closed_s
            if model.drain:
                self._close(model.name)
            elif placement is not None or known.state != "serving" or known != old:
                await self._changes.add(known.added(placement))
                known.state, placement = "serving", None

    def _placement(self, args: AppArgs, leaving: Sequence[str]) -> PlacementPlan | None:
        """For the models of `args` and those that are leaving; None where they have no room together."""
        current = self._changes.placement or self._first_placement
        others: list[KnownModel] = [self._known[name] for name in leaving if name not in _names(args)]
        try:
            return interim_placement(args, others, self._times, self._specs, current)
        except ConfigError:
            if others:
                return None
            raise


def _names(args: AppArgs) -> set[str]:
    return {model.name for model in args.models}


def _weights(model: ModelArgs) -> tuple[object, ...]:
    """What host copies depend on."""
    return model.path, model.tiny, model.dtype
