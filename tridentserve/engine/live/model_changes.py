"""Models that come and go while an engine runs: their host copies on every node, the workers, and the scheduler."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tridentserve.engine.live.core_thread import CoreThread
from tridentserve.engine.live.fleet import WorkerFleet
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.spawning.start_options import list_start_options
from tridentserve.engine.live.warming.warm_up_runs import WarmUpOrder
from tridentserve.engine.live.warming.warmer import Warmer
from tridentserve.errors import LoraFileError
from tridentserve.models.lora_files import compute_digest
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.protocols import StageMemory
from tridentserve.scheduling import events as ev
from tridentserve.stages import Stage

if TYPE_CHECKING:
    from tridentserve.engine.live.weights.host_copies import HostCopies

T = TypeVar("T")
# A function of the directory of host copies, the model, the device that it is served on, and what it is about.
_OnNode = Callable[..., T]
_ChangeKind = type[ev.ModelAdded] | type[ev.Drained] | type[ev.Unload]


class ModelChanges:
    """Lives in the engine's event loop. One model changes at a time."""

    def __init__(
        self, core: CoreThread, fleet: WorkerFleet, warmer: Warmer, set_memory: Callable[[StageMemory], None]
    ) -> None:
        """`set_memory` replaces the memory that the engine expects plans to take."""
        self._core = core
        self._fleet = fleet
        self._warmer = warmer
        self.set_memory = set_memory
        self._awaited: defaultdict[tuple[_ChangeKind, str], list[asyncio.Future[None]]] = defaultdict(list)
        self._drained: set[str] = set()
        self.placement: PlacementPlan | None = None
        """The placement in force, once it has changed."""

    async def call_in_core(self, function: Callable[[], T]) -> T:
        """Run a function in the scheduler's thread, to which the scheduler's cost model belongs."""
        return await asyncio.wrap_future(self._core.call(function))

    async def prepare(self, source: ModelSource) -> None:
        """Make the host copies of a model on every node, in a process of their own, and tell the workers of the model.
        Raises the `TridentServeError` of a model that cannot be read, and `RayError` where Ray fails."""
        await asyncio.gather(*(self._make_copies(node_id, source) for node_id in self._fleet.nodes))
        await self._fleet.add_model(source)

    async def rehearse(self, source: ModelSource) -> None:
        """Make the host copies of a model that is to replace one of the same name, which continues to serve meanwhile.
        Raises as `prepare` does; none of the copies is left then."""
        made = (self._make_copies(node_id, source) for node_id in self._fleet.nodes)
        results = await asyncio.gather(*made, return_exceptions=True)
        if errors := [result for result in results if isinstance(result, BaseException)]:
            await self.drop_rehearsed(source)
            raise errors[0]

    async def drop_rehearsed(self, source: ModelSource) -> None:
        """Remove the host copies of a model that will not be prepared after all."""
        drops = (self._run_on_node(node_id, _drop_copies, source) for node_id in self._fleet.nodes)
        await asyncio.gather(*drops, return_exceptions=True)  # a node that is lost has none

    async def check_lora(self, source: ModelSource, file: Path) -> str:
        """The digest of a LoRA file, once it has been read on every node, in a process of its own, and fits the model.
        Raises `LoraFileError`."""
        checks = (self._run_on_node(node_id, _check_lora, source, file) for node_id in self._fleet.nodes)
        digests = set(await asyncio.gather(*checks))
        if len(digests) > 1:
            raise LoraFileError(f"{file} is not the same on all nodes")
        return digests.pop()

    async def add(self, event: ev.ModelAdded) -> None:
        """Have the scheduler take requests of a model that has been prepared; returns when it does."""
        heard = self._expect(ev.ModelAdded, event.model)
        self._core.post(event)
        await heard

    async def warm_up(self, order: WarmUpOrder) -> None:
        """Have the workers run what they will be asked for of a model that has been added, beside requests; returns
        when they have, or when the model is closed or removed."""
        await self._fleet.wait_until_placed()
        await self._warmer.warm_model(self._fleet, order, self._core.post)

    def close(self, model: str) -> None:
        """Take no new requests of a model."""
        self._warmer.ask_to_stop_model(model)
        self._core.post(ev.ModelDraining(model))

    async def wait_until_drained(self, model: str) -> None:
        """Wait until the last request of a closed model has ended. The caller may cancel this."""
        if model not in self._drained:
            await self._expect(ev.Drained, model)

    async def remove(self, event: ev.ModelRemoved) -> None:
        """End what is left of a model; returns when its weights and its host copies are gone."""
        await self._warmer.drop_model(event.model)
        heard = self._expect(ev.Unload, event.model)
        self._core.post(event)
        await heard
        await self._fleet.unload_model(event.model)

    async def discard(self, model: str) -> None:
        """Undo `prepare`, also where it did not come to its end."""
        await self._fleet.unload_model(model)

    def note_event(self, event: ev.Event, effects: Iterable[ev.Effect]) -> None:
        """Take note of an event that the scheduler has handled, and of its effects."""
        if isinstance(event, ev.ModelAdded):
            self._drained.discard(event.model)
            self._wake(ev.ModelAdded, event.model)
        for effect in effects:
            match effect:
                case ev.Place():
                    self.placement = effect.plan
                case ev.Drained() | ev.Unload():
                    self._drained.add(effect.model)
                    self._wake(type(effect), effect.model)
                case _:
                    pass

    def _expect(self, kind: _ChangeKind, model: str) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited[kind, model].append(future)
        return future

    def _wake(self, kind: _ChangeKind, model: str) -> None:
        for future in self._awaited.pop((kind, model), []):
            if not future.done():
                future.set_result(None)

    async def _make_copies(self, node_id: str, source: ModelSource) -> None:
        await self._run_on_node(node_id, _make_copies, source)

    async def _run_on_node(self, node_id: str, function: _OnNode[T], source: ModelSource, *more: Any) -> T:
        config = self._fleet.any_config
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        start = list_start_options(has_gpu=config.options.torch_device != "cpu")
        remote: Any = ray.remote(function)  # Ray's types know no functions of any arguments
        task = remote.options(num_cpus=0, max_retries=2, scheduling_strategy=strategy, **start)
        try:
            result: T = await task.remote(config.options.host_dir, source, config.options.torch_device, *more)
            return result
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise


def _make_copies(folder: Path, source: ModelSource, torch_device: str) -> None:
    """Make the host copies of all stages of a model on the node where this runs, where they do not exist yet."""
    _open_copies(folder, source, torch_device).make_all(Replica(source.name, stage) for stage in Stage)


def _drop_copies(folder: Path, source: ModelSource, torch_device: str) -> None:
    """Remove the host copies of a model from the node where this runs."""
    _open_copies(folder, source, torch_device).drop_model(source.name)


def _check_lora(folder: Path, source: ModelSource, torch_device: str, file: Path) -> str:
    """The digest of a LoRA file that fits a model, on the node where this runs. Raises `LoraFileError`."""
    from tridentserve.pipelines.loading import load_adapter

    try:
        digest = compute_digest(file)
    except OSError as error:
        raise LoraFileError(f"{file} cannot be read on all nodes: {error.strerror}") from error
    load_adapter(source.folder, frozenset({Stage.DIFFUSE}), weights=False).loras.check(file)
    return digest


def _open_copies(folder: Path, source: ModelSource, torch_device: str) -> HostCopies:
    import torch

    from tridentserve.engine.live.weights.host_copies import HostCopies

    return HostCopies(folder, {source.name: source}, torch.device(torch_device))
