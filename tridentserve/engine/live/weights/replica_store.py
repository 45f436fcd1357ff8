"""The replicas a worker has in its memory: fetched when a plan needs them, evicted when another needs the room.

Adjust-on-Dispatch (TridentServe, arXiv 2510.02838, section 5.3): a new placement changes what is wanted, at once, and
nothing else. A plan that needs a replica which is not there fetches it in its own turn, or while the plan before
computes, from a worker of the node that has it or else from the node's host copy. What is not wanted any more leaves
when its room is needed.

A replica is one run of bytes on the device, packed like the host copy, with the tensors of the models as views: it
moves in blocks, and takes its own size and no more. The structure of its models is made once and stays.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tridentserve.device import find_device
from tridentserve.engine.eviction import choose_victims
from tridentserve.engine.live.messages import ReplicaLoad
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.peer_weights import PeerWeights, WeightOrder, choose_timeout_s
from tridentserve.engine.live.weights.weights_ahead import WeightsAhead
from tridentserve.engine.live.weights.weights_loader import LoadedWeights, OpenedWeights, WeightsLoader
from tridentserve.errors import HandoffError, OutOfMemoryError, WorkerError
from tridentserve.models.lora_files import LoraFile
from tridentserve.models.step_cache import StepCache
from tridentserve.parallel import SequenceGroup
from tridentserve.pipelines import kernels
from tridentserve.pipelines.base import PipelineAdapter
from tridentserve.pipelines.encoder_memo import EncoderMemo, install_memo
from tridentserve.pipelines.loading import load_adapter
from tridentserve.pipelines.lora.lora_cache import LoraCache
from tridentserve.plans import DispatchPlan, Replica, WorkerId

logger = logging.getLogger(__name__)


class DeviceCall(Protocol):
    """Runs a function where the device is used."""

    def __call__(self, function: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory of one worker, and the parts of it that are reserved."""

    total_bytes: int
    handoff_bytes: int
    """Memory of the handoff buffer."""
    planned_group_bytes: int
    """Memory that is planned for process groups."""
    count_missing_bytes: Callable[[int], int] = lambda expected_bytes: 0
    """Tells how much of so much memory, for all but process groups, the device turned out not to have."""

    @property
    def group_bytes(self) -> int:
        """Memory of process groups and of what else torch's allocator does not know of: as planned, until it is seen to
        leave less for the rest."""
        return self.planned_group_bytes + self.count_missing_bytes(self.total_bytes - self.planned_group_bytes)

    @property
    def reserve_bytes(self) -> int:
        """Memory that weights and activations cannot use."""
        return self.handoff_bytes + self.group_bytes


@dataclass(slots=True)
class _Resident:
    """A replica in memory."""

    loaded: LoadedWeights
    readers: int = 0
    """Number of peers that it is being sent to."""
    unread: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there are no readers; the replica cannot leave before that."""

    def __post_init__(self) -> None:
        self.unread.set()


def list_needed_replicas(plan: DispatchPlan, worker_id: WorkerId) -> tuple[Replica, ...]:
    """The replicas that a plan uses on one of its workers."""
    return tuple(Replica(plan.model, stage) for stage in plan.stages if worker_id in plan.workers_of(stage))


class ReplicaStore:
    """The replicas of one worker. All but `adapter` belongs to its event loop; one `prepare` runs at a time."""

    def __init__(
        self,
        host: HostCopies,
        device: torch.device,
        budget: MemoryBudget,
        on_device: DeviceCall,
        loader: WeightsLoader,
        peers: PeerWeights | None,
        on_load: Callable[[ReplicaLoad], None] = lambda load: None,
        lora_bytes: int | None = None,
    ) -> None:
        """`on_load` is called for every load, also for those at the start. `lora_bytes`: see `LoraCache`."""
        self._host = host
        self._device = device
        self._budget = budget
        self._on_device = on_device
        self.loader = loader
        self._peers = peers
        self._on_load = on_load
        self.loras = LoraCache(lora_bytes)
        """The LoRAs of all its models. Nobody uses it while `prepare` runs."""
        self.wanted: frozenset[Replica] = frozenset()
        self._adapters: dict[Replica, PipelineAdapter] = {}
        self._memos: dict[Replica, EncoderMemo] = {}
        self._resident: dict[Replica, _Resident] = {}  # the one used last at the end
        self._ahead = WeightsAhead(loader)
        self._evicted: list[Replica] = []  # not reported yet
        self._letting_go: set[asyncio.Task[None]] = set()

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return sum(resident.loaded.num_bytes for resident in self._resident.values())

    @property
    def ahead_bytes(self) -> int:
        """Bytes of weights that have come ahead of the plan that needs them."""
        return self._ahead.num_bytes

    @property
    def resident(self) -> tuple[Replica, ...]:
        """The longest unused first."""
        return tuple(self._resident)

    def adapter(self, replica: Replica) -> PipelineAdapter:
        """A replica that `prepare` has made resident."""
        if replica not in self._resident:
            raise WorkerError(f"{replica} is not in memory")
        return self._adapters[replica]

    @contextmanager
    def use(self, replica: Replica, group: SequenceGroup | None) -> Iterator[PipelineAdapter]:
        """A replica that `prepare` has made resident, to compute with the workers of a group. Raises `GroupError` where
        its weights are divided and cannot be put together."""
        adapter = self.adapter(replica)
        layered = self._resident[replica].loaded.layered
        with layered.gather(group) if layered is not None else nullcontext():
            yield adapter

    async def load_placement(self, wanted: frozenset[Replica]) -> None:
        """Make the replicas of a placement resident; one that does not fit is loaded when a plan needs it."""
        self.wanted = wanted
        for replica in sorted(wanted):
            try:
                await self.prepare((replica,), keep=wanted)
            except OutOfMemoryError as error:
                logger.warning("%s is not loaded until a plan needs it: %s", replica, error)

    async def prepare(
        self,
        needed: Collection[Replica],
        peak_bytes: int = 0,
        queued: Collection[Replica] = (),
        keep: Collection[Replica] = (),
        tell: Callable[[ReplicaLoad], None] = lambda load: None,
        loras: Collection[LoraFile] = (),
    ) -> None:
        """Have all replicas that a plan needs in memory, with room for its activations.

        `peak_bytes` has the plan's `loras` in it; others leave before any replica does. `queued` are the replicas that
        waiting plans need, `keep` those that must stay. `tell` is called for each load. Raises `OutOfMemoryError`, with
        the numbers, when the plan can never fit here, before anything is evicted or loaded."""
        await self._ahead.settle()
        await self._ahead.drop(needed)
        missing = [replica for replica in needed if replica not in self._resident]
        opened = {replica: await self._on_device(self.loader.open, replica) for replica in missing}
        sizes = {replica: resident.loaded.num_bytes for replica, resident in self._resident.items()}
        sizes |= {replica: one.num_bytes for replica, one in opened.items()}
        fixed = set(needed).union(replica for replica in keep if replica in self._resident)
        self._check_room(fixed, sizes, peak_bytes)
        excess_bytes = sum(sizes.values()) + peak_bytes + self._budget.reserve_bytes - self._budget.total_bytes
        if self.loras.num_bytes:
            excess_bytes += await self._on_device(self.loras.make_room, excess_bytes, loras)
        for victim in choose_victims(self._resident, fixed, self.wanted, queued, sizes.__getitem__, excess_bytes):
            await self._evict(victim)
        for replica in needed:
            if replica in self._resident:
                self._resident[replica] = self._resident.pop(replica)  # used now
            else:
                tell(await self._load(replica, opened[replica]))

    def _check_room(self, fixed: Collection[Replica], sizes: dict[Replica, int], peak_bytes: int) -> None:
        weights_bytes = sum(sizes[replica] for replica in fixed)
        least_bytes = weights_bytes + peak_bytes + self._budget.reserve_bytes
        if least_bytes > self._budget.total_bytes:
            names = ", ".join(f"{replica.model}:{replica.stage.letter}" for replica in sorted(fixed))
            raise OutOfMemoryError(
                f"{names} needs {least_bytes} bytes ({weights_bytes} for weights, {peak_bytes} for activations, "
                f"{self._budget.handoff_bytes} for the handoff buffer, {self._budget.group_bytes} for process groups), "
                f"this worker has {self._budget.total_bytes}"
            )

    async def _load(self, replica: Replica, opened: OpenedWeights) -> ReplicaLoad:
        start_s = time.perf_counter() - opened.seconds
        if (ahead := self._ahead.take(replica)) is not None:
            loaded, start_s = ahead[0], start_s - ahead[1]
        else:
            loaded = await self.loader.load(replica, opened)
        try:
            await self._on_device(self._attach, replica, loaded)
        except BaseException:
            self._adapters.pop(replica, None)  # with what was attached already
            self._memos.pop(replica, None)
            self.loras.drop_model(replica.model)  # what was read is for the layers of these modules
            await self.loader.close(loaded)
            raise
        self._resident[replica] = _Resident(loaded)
        # A replica that has left and come back in the meantime is not reported as evicted.
        evicted = tuple(other for other in self._evicted if other != replica)
        self._evicted.clear()
        load = ReplicaLoad(replica, evicted, loaded.source, loaded.num_bytes, time.perf_counter() - start_s)
        self._on_load(load)
        return load

    def _attach(self, replica: Replica, loaded: LoadedWeights) -> None:
        if replica not in self._adapters:
            source, stages = self._host.source(replica), frozenset({replica.stage})
            self._adapters[replica] = load_adapter(
                source.folder,
                stages,
                device=str(self._device),
                formats=self._host.formats(replica),
                weights=False,
                image_start=source.image_start,
            )
            kernels.install(self._adapters[replica], source.kernels)
            # Members that skip different layers would wait for each other's shards.
            self._adapters[replica].step_cache = StepCache(0, 0) if loaded.is_divided else source.step_cache
            self._adapters[replica].share_lora_cache(self.loras)
            self._memos[replica] = install_memo(self._adapters[replica])
        loaded.attach(self._adapters[replica])

    def load_ahead(self, needed: Collection[Replica], peak_bytes: int, loras: Collection[LoraFile] = ()) -> None:
        """Begin to bring the weights of the next plan beside the one that computes, whose activations take so many
        bytes with its `loras`: host copies that have been made are mapped, and loaded where there is room. No `prepare`
        may be under way."""

        def count_room() -> int:
            free_bytes = self._budget.total_bytes - self._budget.reserve_bytes - self.resident_bytes
            return free_bytes - peak_bytes - self.loras.count_others(loras)

        missing = [replica for replica in needed if replica not in self._resident]
        if missing or self._ahead.num_bytes:
            self._ahead.begin(missing, count_room)

    async def evict_all_but(self, queued: Collection[Replica]) -> None:
        """Memory has run out, although the budget had room: keep what waiting plans need."""
        await self._ahead.settle()
        await self._ahead.drop()
        for replica in [replica for replica in self._resident if replica not in queued]:
            await self._evict(replica)
        await self._on_device(_free_memory, self._device)

    async def unload_model(self, model: str) -> None:
        """Drop all replicas of a model, which no plan of this worker needs any more, and all that was made for them."""
        self.wanted = frozenset(replica for replica in self.wanted if replica.model != model)
        await self._ahead.settle()
        await self._ahead.drop()
        for replica in [replica for replica in self._resident if replica.model == model]:
            await self._evict(replica)
        self._adapters = {replica: one for replica, one in self._adapters.items() if replica.model != model}
        self._memos = {replica: one for replica, one in self._memos.items() if replica.model != model}
        self._evicted = [replica for replica in self._evicted if replica.model != model]
        self.loras.drop_model(model)
        await self._on_device(_free_memory, self._device)

    async def _evict(self, replica: Replica) -> None:
        resident = self._resident.pop(replica)  # from here on no peer is offered it
        self._evicted.append(replica)
        letting_go = asyncio.create_task(self._release_when_unread(resident))
        self._letting_go.add(letting_go)
        letting_go.add_done_callback(self._letting_go.discard)
        done, _ = await asyncio.wait({letting_go}, timeout=choose_timeout_s(resident.loaded.buffer.nbytes))
        for task in done:
            task.result()
        if not done:
            logger.warning("a peer still reads %s: its memory is free later", replica)
        self._memos[replica].clear()
        adapter = self._adapters[replica]
        await self._on_device(resident.loaded.detach, adapter)
        if adapter.is_rebuilt:
            del self._adapters[replica], self._memos[replica]

    async def _release_when_unread(self, resident: _Resident) -> None:
        await resident.unread.wait()
        await self.loader.close(resident.loaded)

    # The methods that peers call.

    def count_readers(self, replica: Replica, shard: int) -> int | None:
        """Number of peers that the replica is being sent to; None when it is not here, or other shards of it."""
        resident = self._resident.get(replica)
        return resident.readers if resident is not None and self.loader.find_shard(replica) == shard else None

    async def send_weights(self, order: WeightOrder) -> None:
        """Write a replica into a peer's memory. Raises `HandoffError`, also when it has left meanwhile."""
        resident = self._resident.get(order.replica)
        if resident is None or self._peers is None:
            raise HandoffError(f"{order.replica} has left this worker's memory")
        resident.readers += 1
        resident.unread.clear()
        try:
            await self._peers.write_weights(order, resident.loaded.buffer)
        finally:
            resident.readers -= 1
            if not resident.readers:
                resident.unread.set()


def _free_memory(device: torch.device) -> None:
    """Free memory that nothing uses any more: models refer to themselves, and CUDA's allocator keeps freed memory."""
    gc.collect()
    find_device(device).free_cached_memory()
