"""The worker actors of one service: they start together, are connected with one another, and are replaced when lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from tridentserve.engine.live.channels.channel import ChannelError
from tridentserve.engine.live.messages import UNKNOWN_PEAK, ExpectedPeak, ModelSource, WorkerConfig, WorkerReady
from tridentserve.engine.live.spawning.spawner import Spawner
from tridentserve.engine.live.warming.warmer import Warmer, WarmUpProgress
from tridentserve.engine.live.worker_handle import Peers, PlanItem, WorkerHandle
from tridentserve.errors import WorkerError
from tridentserve.plans import DispatchPlan, PlacementPlan, WorkerId
from tridentserve.requests import GenerationInputs
from tridentserve.scheduling.estimation.hot_groups import HotGroup, list_hot_groups

logger = logging.getLogger(__name__)

# A worker that fails to start is tried again with growing pauses, so that a broken node does not spin.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
SILENCE_S = 30.0
"""Seconds after which a worker that does not answer is ended, where a plan of it has failed elsewhere."""


@dataclass(slots=True)
class _FleetWorker:
    """One worker, in its present incarnation."""

    config: WorkerConfig
    """The configuration that its next incarnation starts with."""
    index: int
    """Its place in the fleet."""
    handle: WorkerHandle | None = None
    """None while the worker is down."""
    ready: WorkerReady | None = None
    has_joined: bool = False
    """The scheduler knows that it can take plans."""

    def come_up(self, handle: WorkerHandle, ready: WorkerReady) -> None:
        """It is reached by its peers. How many workers may denoise at once, only its node knows."""
        self.handle, self.ready = handle, ready
        self.config = replace(self.config, spec=replace(self.config.spec, max_denoising=ready.max_denoising))


class WorkerFleet:
    """Starts, connects and replaces the workers. `on_joined` and `on_lost` are called in the event loop."""

    def __init__(
        self,
        configs: list[WorkerConfig],
        spawner: Spawner,
        on_joined: Callable[[WorkerConfig], None],
        on_lost: Callable[[WorkerId, str], None],
        warmer: Warmer | None = None,
    ) -> None:
        self._workers = {config.spec.worker_id: _FleetWorker(config, index) for index, config in enumerate(configs)}
        self._spawner = spawner
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._warmer = warmer
        self._watchers: dict[WorkerId, asyncio.Task[None]] = {}
        self._num_makings = 0  # how often hot groups have been made
        self._placed: asyncio.Future[list[Any]] | None = None  # done when the workers know the latest placement
        # The memory that no worker has, since the groups of the start took more than was planned.
        self._missing_bytes = 0

    @property
    def alive(self) -> list[WorkerId]:
        return [worker_id for worker_id, member in self._workers.items() if member.handle is not None]

    @property
    def joined(self) -> list[WorkerId]:
        """Those that take the scheduler's plans."""
        return [worker_id for worker_id, member in self._workers.items() if member.has_joined]

    def list_configs(self) -> list[WorkerConfig]:
        """The configurations of the workers that are up."""
        return [member.config for member in self._workers.values() if member.handle is not None]

    def get_handle(self, worker_id: WorkerId) -> WorkerHandle:
        """Raises `WorkerError` while the worker is down."""
        handle = self._workers[worker_id].handle
        if handle is None:
            raise WorkerError(f"worker {worker_id} is down")
        return handle

    def list_handles(self, worker_ids: Collection[WorkerId]) -> list[WorkerHandle]:
        """The handles of those of these workers that are up."""
        handles = (self._workers[worker_id].handle for worker_id in worker_ids)
        return [handle for handle in handles if handle is not None]

    def end_broken(self, worker_id: WorkerId) -> None:
        """End a worker whose process cannot use its device any more; another process may, and takes its place."""
        for handle in self.list_handles([worker_id]):
            logger.error("worker %s is ended: its process cannot use its device any more", worker_id)
            handle.kill()

    def run_plan(
        self,
        worker_id: WorkerId,
        plan: DispatchPlan,
        inputs: Mapping[str, GenerationInputs],
        take: Callable[[PlanItem], None],
        peak: ExpectedPeak = UNKNOWN_PEAK,
        is_watched: bool = False,
    ) -> bool:
        """Give a worker its next plan, with the content of each member's request and the memory that the activations
        are expected to take; `is_watched`: somebody wants to hear of its steps. `take` is called with what comes of the
        plan, and must not raise. False while the worker is down: nothing comes then."""
        handle = self._workers[worker_id].handle
        if handle is not None:
            handle.run_plan(plan, inputs, peak, is_watched, take)
        return handle is not None

    async def end_if_silent(self, worker_id: WorkerId) -> None:
        """Kill a worker whose process does not answer, as one that stands still: its plans would never end."""
        handle = self._workers[worker_id].handle
        if handle is None:
            return
        try:
            await asyncio.wait_for(handle.count_parcels(), SILENCE_S)
        except TimeoutError:
            logger.warning("worker %s has not answered for %g s, and is ended", worker_id, SILENCE_S)
            handle.kill()
        except ChannelError:  # it is lost already
            return

    def set_placement(self, placement: PlacementPlan) -> None:
        """Tell all workers what they are to hold from now on; one that comes back begins with it."""
        told = []
        for worker_id, member in self._workers.items():
            replicas = placement.replicas.get(worker_id, frozenset())
            member.config = replace(member.config, replicas=replicas, label=placement.describe(worker_id))
            if member.handle is not None:
                told.append(member.handle.set_placement(replicas, member.config.label))
        self._placed = asyncio.gather(*told, return_exceptions=True)
        self._prepare_groups()

    async def wait_until_placed(self) -> None:
        """Wait until the workers know the latest placement."""
        if self._placed is not None:
            await asyncio.shield(self._placed)

    def _prepare_groups(self) -> None:
        """Have the workers that are up make the hot groups of the placement that they do not have, beside their plans.
        Nobody waits for them. All members hear of them in the same order."""
        for worker_id, groups in self._list_groups_to_make().items():
            for handle in self.list_handles([worker_id]):
                handle.prepare_groups(groups, self._num_makings)

    def _list_groups_to_make(self) -> dict[WorkerId, list[HotGroup]]:
        """The hot groups of each worker that is up, for another making."""
        self._num_makings += 1
        found = self.list_hot_groups()
        members = {worker_id: [group for group in found if worker_id in group.workers] for worker_id in self.alive}
        return {worker_id: groups for worker_id, groups in members.items() if groups}

    def list_hot_groups(self) -> list[HotGroup]:
        """The hot groups of the workers that are up."""
        configs = self.list_configs()
        placement = PlacementPlan({config.spec.worker_id: config.replicas for config in configs})
        incarnations = {config.spec.worker_id: config.incarnation for config in configs}
        width = max((config.hot_width for config in configs), default=1)
        return list_hot_groups([config.spec for config in configs], placement, width, incarnations)

    @property
    def nodes(self) -> list[str]:
        """Ray's ids of the nodes on which there are workers now."""
        return list(dict.fromkeys(member.ready.node_id for member in self._workers.values() if member.ready))

    @property
    def any_config(self) -> WorkerConfig:
        """The configuration of one worker; most of it is the same for all."""
        return next(iter(self._workers.values())).config

    async def add_model(self, source: ModelSource) -> None:
        """Tell all workers of another model; one that comes back later knows it from its start."""
        calls = []
        for member in self._workers.values():
            member.config = replace(member.config, sources={**member.config.sources, source.name: source})
            if member.handle is not None:
                calls.append(member.handle.add_model(source))
        await asyncio.gather(*calls, return_exceptions=True)  # a worker that is lost comes back with it

    async def unload_model(self, model: str) -> None:
        """Have all workers drop a model. Nothing of it runs or waits on any of them."""
        calls = []
        for member in self._workers.values():
            sources = {name: source for name, source in member.config.sources.items() if name != model}
            member.config = replace(member.config, sources=sources)
            if member.handle is not None:
                calls.append(member.handle.unload_model(model))
        await asyncio.gather(*calls, return_exceptions=True)  # a worker that is lost holds nothing

    async def start(self, tell: Callable[[WarmUpProgress], object] = lambda progress: None) -> None:
        """Start all workers, each with its replicas, and warm them up, of which `tell` hears. Raises what the first one
        that fails raises."""
        began_s = time.monotonic()
        started = {worker_id: self._spawn(member) for worker_id, member in self._workers.items()}
        num_started = 0

        async def start_one(worker_id: WorkerId, handle: WorkerHandle) -> WorkerReady:
            nonlocal num_started
            ready = await _start_and_connect(handle)
            num_started += 1
            logger.info("worker %s has started and holds its weights (%d of %d)", worker_id, num_started, len(started))
            return ready

        logger.info("starting %d workers", len(started))
        answers = await asyncio.gather(*(start_one(*each) for each in started.items()))
        for (worker_id, handle), ready in zip(started.items(), answers, strict=True):
            self._workers[worker_id].come_up(handle, ready)
        everyone = ray.put(self._list_addresses(self._workers))  # once, not once for each of them
        await asyncio.gather(*(handle.connect_peers(everyone) for handle in started.values()))
        loaded_s = time.monotonic()
        hot, number = self._list_groups_to_make(), self._num_makings
        made = await asyncio.gather(
            *(self.get_handle(each).make_groups(groups, number) for each, groups in hot.items())
        )
        self._note_missing_bytes(max(made, default=0))
        logger.info(
            "%d workers started in %.1f s, their groups in %.1f s",
            len(started),
            loaded_s - began_s,
            time.monotonic() - loaded_s,
        )
        if self._warmer is not None:
            await self._warmer.warm_all(self, tell)
        for worker_id in started:
            self._begin_watch(worker_id)

    def _note_missing_bytes(self, num_bytes: int) -> None:
        """The scheduler plans with the same for all workers, so that they stay interchangeable."""
        self._missing_bytes = num_bytes
        if num_bytes > 0:
            logger.warning(
                "process groups leave each worker %d bytes less than planned: a smaller cluster.memory_mb, or fewer "
                "groups (cluster.max_groups), would have the placement planned with what there is",
                num_bytes,
            )

    async def stop(self) -> None:
        """End all workers."""
        for watcher in self._watchers.values():
            watcher.cancel()
        for member in self._workers.values():
            if member.handle is not None:
                member.handle.kill()
                member.handle = None

    def _spawn(self, member: _FleetWorker) -> WorkerHandle:
        return self._spawner.spawn(member.config, member.index)

    def _list_addresses(self, worker_ids: Collection[WorkerId]) -> Peers:
        """The addresses of those of these workers that are up, for their peers."""
        members = ((worker_id, self._workers[worker_id]) for worker_id in worker_ids)
        return {
            worker_id: (member.handle.actor, member.ready)
            for worker_id, member in members
            if member.handle is not None and member.ready is not None
        }

    def _begin_watch(self, worker_id: WorkerId) -> None:
        member, handle = self._workers[worker_id], self.get_handle(worker_id)
        self._watchers[worker_id] = asyncio.get_running_loop().create_task(self._watch(worker_id, handle))
        member.has_joined = True
        spec = member.config.spec
        self._on_joined(
            replace(member.config, spec=replace(spec, memory_bytes=spec.memory_bytes - self._missing_bytes))
        )

    async def _watch(self, worker_id: WorkerId, handle: WorkerHandle) -> None:
        """Wait until the worker's process ends, then bring the worker back."""
        death = asyncio.ensure_future(_wait_for_death(handle))
        why = await _wait_for_first(death, asyncio.ensure_future(handle.wait_for_break()))
        # A worker whose connection is broken lives on, and would keep its GPU.
        handle.kill()
        member = self._workers[worker_id]
        member.handle = member.ready = None
        member.has_joined = False
        for other in self.list_handles(self.alive):  # they may be waiting for it in a collective
            other.abort_groups_of(worker_id)
        self._on_lost(worker_id, why)
        handle.fail_plans(why)
        logger.warning("worker %s is lost: %s", worker_id, await death)  # Ray knows best why a process has ended
        await self._try_until_back(worker_id, member)
        self._begin_watch(worker_id)

    async def _try_until_back(self, worker_id: WorkerId, member: _FleetWorker) -> None:
        pause_s = _FIRST_PAUSE_S
        while not await self._bring_back(worker_id, member):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                await self._spawner.prepare(member.index)
            except Exception as error:  # whatever it is, the next try may do better
                logger.warning("what worker %s needs could not be brought to it: %s", worker_id, error)

    async def _bring_back(self, worker_id: WorkerId, member: _FleetWorker) -> bool:
        """Start a new incarnation, connect it with the others, and warm it up; False when that fails."""
        handle: WorkerHandle | None = None
        try:
            member.config = replace(member.config, incarnation=member.config.incarnation + 1)
            began_with = member.config.sources
            handle = self._spawn(member)
            ready = await _start_and_connect(handle)
            await self._catch_up(member, handle, began_with)
            # Ray may have moved its bundle: the scheduler must know the node, because no group spans two.
            member.config = replace(member.config, spec=replace(member.config.spec, node_id=ready.node_id))
            member.come_up(handle, ready)
            # It started with the placement of that time.
            await handle.set_placement(member.config.replicas, member.config.label)
            await handle.connect_peers(self._list_addresses(self._workers))
            newcomer = self._list_addresses([worker_id])
            others = self.list_handles([other for other in self.alive if other != worker_id])
            await asyncio.gather(*(other.connect_peers(newcomer) for other in others), return_exceptions=True)
            self._prepare_groups()
            if self._warmer is not None:
                await self._warmer.warm_again(self, worker_id)
        except Exception as error:  # whatever it is, the next try may do better
            logger.warning("worker %s did not come back: %s", worker_id, error)
            member.handle = member.ready = None
            if handle is not None:
                handle.kill()
            return False
        return True

    async def _catch_up(
        self, member: _FleetWorker, handle: WorkerHandle, began_with: Mapping[str, ModelSource]
    ) -> None:
        """Tell a worker that has just started which models came and went in the meantime, until it knows them all."""
        known = began_with
        while known != (now := member.config.sources):
            for name, source in known.items():
                if now.get(name) != source:
                    await handle.unload_model(name)
            for name, source in now.items():
                if known.get(name) != source:
                    await handle.add_model(source)
            known = now


async def _start_and_connect(handle: WorkerHandle) -> WorkerReady:
    ready = await handle.start()
    await handle.open_channel(ready.channel)
    return ready


async def _wait_for_first(*tasks: asyncio.Future[str]) -> str:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return next(iter(done)).result()


async def _wait_for_death(handle: WorkerHandle) -> str:
    """Wait for a call that only ends with its worker; returns why it has ended."""
    try:
        await handle.watch()
    except RayError as error:
        return str(error).splitlines()[0]
    return "its watch ended"
