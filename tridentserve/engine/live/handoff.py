"""The handoff buffer: outputs are pushed into the next worker's slab before it asks (arXiv 2510.02838, section 5.2).

The receiver's slots are the backpressure: where none is free, or NIXL cannot be used, the bytes go to host memory.
A producer keeps what it made until the request ends, so a push that was lost can be asked for again.
All methods run on the worker's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from tridentserve.engine.live.handoff_peer import HandoffKey, Peer, Transfer
from tridentserve.engine.live.nixl_link import NixlLink, TransferStuckError
from tridentserve.engine.live.parcel import Layout, Parcel
from tridentserve.engine.live.slab import SlabAllocator
from tridentserve.errors import HandoffError
from tridentserve.plans import WorkerId

# Far more than can have a push under way when they end.
REMEMBERED_REQUESTS = 4096


@dataclass(slots=True)
class _Slot:
    """A reserved part of the slab. `arrived` is done when the producer's bytes are there. `doomed`: the request has
    ended, free it when the writer is done with it."""

    offset: int
    producer: WorkerId
    arrived: Future[None]
    layout: Layout | None = None
    doomed: bool = False


@dataclass(slots=True)
class _Inbox:
    slots: dict[HandoffKey, _Slot] = field(default_factory=dict)
    host: dict[HandoffKey, Parcel] = field(default_factory=dict)


class HandoffBuffer:
    """What one worker has made and keeps (outbox), and what it has been given (inbox: slab slots, host memory)."""

    def __init__(
        self,
        worker_id: WorkerId,
        peers: Mapping[WorkerId, Peer],
        slab: torch.Tensor,
        link: NixlLink | None,
        on_transfer: Callable[[Transfer], None] = lambda transfer: None,
    ) -> None:
        self._worker_id = worker_id
        self._peers = peers
        self._slab = slab
        self._link = link
        self._on_transfer = on_transfer
        self._allocator = SlabAllocator(slab.numel() if link is not None else 0)
        self._outbox: dict[HandoffKey, Parcel] = {}
        self._inbox = _Inbox()
        self._pushes: dict[tuple[HandoffKey, WorkerId], asyncio.Task[None]] = {}
        self._stuck: set[asyncio.Task[None]] = set()
        # The last plan of requests that have ended lately: what comes in of them afterwards is dropped.
        self._ended: OrderedDict[str, int] = OrderedDict()

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slab that are reserved or hold a parcel."""
        return self._allocator.used_bytes

    @property
    def num_parcels(self) -> int:
        """Parcels kept here, made and received: 0 when no request is under way."""
        return len(self._outbox) + len(self._inbox.slots) + len(self._inbox.host)

    # The producer's side.

    def keep(self, key: HandoffKey, parcel: Parcel) -> None:
        """Keep an output until `forget`."""
        if not self._has_ended(key):
            self._outbox[key] = parcel

    def push(self, key: HandoffKey, to: WorkerId) -> asyncio.Task[None]:
        """Start (or join) the push of a kept output. The task fails with `HandoffError`."""
        running = self._pushes.get((key, to))
        if running is None:
            running = asyncio.get_running_loop().create_task(self._push(key, to))
            self._pushes[key, to] = running
            running.add_done_callback(lambda task: self._pushed(key, to, task))
        return running

    def _pushed(self, key: HandoffKey, to: WorkerId, task: asyncio.Task[None]) -> None:
        self._pushes.pop((key, to), None)
        if not task.cancelled():
            task.exception()  # seen: the consumer asks again and gets the error there

    async def _push(self, key: HandoffKey, to: WorkerId) -> None:
        parcel = self._outbox.get(key)
        if parcel is None:
            raise HandoffError(f"{self._worker_id} holds no output of plan {key.plan_id}: it has been dropped")
        start_s = time.perf_counter()
        layout, peer = parcel.layout(), self._peers[to]
        if await self._push_through_nixl(key, parcel, layout, peer):
            self._on_transfer(Transfer("nixl", layout.nbytes, time.perf_counter() - start_s))
            return
        buffer = await asyncio.to_thread(parcel.pack, layout)
        await peer.deliver(key, layout, buffer)
        self._on_transfer(Transfer("host", layout.nbytes, time.perf_counter() - start_s))

    async def _push_through_nixl(self, key: HandoffKey, parcel: Parcel, layout: Layout, peer: Peer) -> bool:
        """False when there is no room on either side, or NIXL fails."""
        if self._link is None or peer.link_name is None:
            return False
        staging = self._allocator.allocate(layout.nbytes)
        if staging is None:
            return False
        try:
            target = await peer.reserve(key, self._worker_id, layout.nbytes)
            if target is None:
                self._allocator.free(staging)
                return False
            parcel.pack_into(self._slab[staging : staging + layout.nbytes], layout)
            self._wait_for_copies()
        except BaseException:
            self._allocator.free(staging)
            raise
        ended, settled = self._link.write(peer.link_name, staging, target, layout.nbytes, key.note())
        try:
            await asyncio.wrap_future(ended)
            await peer.commit(key, layout)
        except TransferStuckError:
            self._once_settled(settled, key, staging, peer)
            return False
        except HandoffError:
            self._allocator.free(staging)
            await peer.release(key)
            return False
        self._allocator.free(staging)
        return True

    def _once_settled(self, settled: Future[None], key: HandoffKey, staging: int, peer: Peer) -> None:
        """Give both slots of a write that took too long back when its bytes can no longer move."""

        async def give_back() -> None:
            await asyncio.wrap_future(settled)
            self._allocator.free(staging)
            await peer.release(key)

        task = asyncio.get_running_loop().create_task(give_back())
        self._stuck.add(task)
        task.add_done_callback(self._stuck.discard)

    def _wait_for_copies(self) -> None:
        """NIXL knows nothing of CUDA's streams: copies must have ended before it, or another, touches the bytes."""
        if self._slab.is_cuda:
            torch.cuda.current_stream(self._slab.device).synchronize()

    async def send(self, key: HandoffKey, to: WorkerId) -> None:
        """A consumer asks for an output: join the push under way, or push."""
        await asyncio.shield(self.push(key, to))

    # The consumer's side.

    async def reserve(self, key: HandoffKey, producer: WorkerId, nbytes: int) -> int | None:
        if self._link is None or key in self._inbox.slots or key in self._inbox.host or self._has_ended(key):
            return None
        offset = self._allocator.allocate(nbytes)
        if offset is not None:
            self._inbox.slots[key] = _Slot(offset, producer, self._link.expect(key.note()))
        return offset

    async def commit(self, key: HandoffKey, layout: Layout) -> None:
        slot = self._inbox.slots.get(key)
        if slot is None:
            raise HandoffError(f"{self._worker_id} has no slot reserved for plan {key.plan_id}")
        await asyncio.wrap_future(slot.arrived)
        slot.layout = layout
        if slot.doomed:
            self._free(key)

    async def release(self, key: HandoffKey) -> None:
        if key in self._inbox.slots:
            self._free(key)

    async def deliver(self, key: HandoffKey, layout: Layout, buffer: torch.Tensor) -> None:
        if not self._has_ended(key):
            self._inbox.host[key] = Parcel.unpack(buffer, layout, torch.device("cpu"))

    async def take(self, key: HandoffKey, source: WorkerId) -> Parcel:
        """The outputs of a plan: made here, pushed here, or else asked for. A slot is free again on return."""
        if source == self._worker_id:
            parcel = self._outbox.get(key)
            if parcel is None:
                raise HandoffError(f"{self._worker_id} holds no output of plan {key.plan_id}: it has been dropped")
            self._on_transfer(Transfer("local", parcel.layout().nbytes, 0.0))
            return parcel
        if not self._has(key):
            await self._peers[source].send(key, self._worker_id)
        parcel = self._inbox.host.pop(key, None)
        if parcel is not None:
            on_device = {name: tensor.to(self._slab.device) for name, tensor in parcel.tensors.items()}
            return Parcel(on_device, parcel.values)
        slot = self._inbox.slots.get(key)
        if slot is None or slot.layout is None:
            raise HandoffError(f"the output of plan {key.plan_id} did not arrive at {self._worker_id} from {source}")
        parcel = Parcel.unpack(self._slab[slot.offset :], slot.layout, self._slab.device)
        self._wait_for_copies()
        self._free(key)
        return parcel

    def _has(self, key: HandoffKey) -> bool:
        slot = self._inbox.slots.get(key)
        return key in self._inbox.host or (slot is not None and slot.layout is not None)

    def _free(self, key: HandoffKey) -> None:
        slot = self._inbox.slots.pop(key)
        if self._link is not None and not slot.arrived.done():
            self._link.stop_expecting(key.note())
        self._allocator.free(slot.offset)

    # The end of a request, and of a peer.

    def forget(self, request_id: str, last_plan_id: int) -> None:
        """Drop what is kept of a request's plans up to `last_plan_id`. A slot that is being written is freed later."""

        self._ended[request_id] = max(last_plan_id, self._ended.get(request_id, -1))
        self._ended.move_to_end(request_id)
        while len(self._ended) > REMEMBERED_REQUESTS:
            self._ended.popitem(last=False)

        def is_old(key: HandoffKey) -> bool:
            return key.request_id == request_id and self._has_ended(key)

        for kept in (self._outbox, self._inbox.host):
            for key in [key for key in kept if is_old(key)]:
                del kept[key]
        for key, slot in list(self._inbox.slots.items()):
            if is_old(key):
                slot.doomed = True
                if slot.layout is not None:
                    self._free(key)

    def has_left(self, request_id: str, plan_id: int) -> bool:
        """Whether a request has ended that plan `plan_id` was made for."""
        return self._has_ended(HandoffKey(request_id, plan_id))

    def _has_ended(self, key: HandoffKey) -> bool:
        return key.plan_id <= self._ended.get(key.request_id, -1)

    def lose_peer(self, worker_id: WorkerId) -> None:
        """A peer's process has ended: slots it was writing into are free."""
        for key, slot in list(self._inbox.slots.items()):
            if slot.producer == worker_id and slot.layout is None:
                self._free(key)
