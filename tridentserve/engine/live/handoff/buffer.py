"""The handoff buffer: outputs are pushed into the next worker's slab before it asks (arXiv 2510.02838, section 5.2).

The receiver's slots are the backpressure: where none is free, or NIXL cannot be used, the bytes go to host memory.
A producer keeps what it made until the plan that uses it has ended, so a push that was lost can be asked for again.
All methods run on the worker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, TypeVar

import torch

from tridentserve.device import find_device
from tridentserve.engine.live.handoff.checkpoint_store import CheckpointStore
from tridentserve.engine.live.handoff.inbox import Inbox
from tridentserve.engine.live.handoff.outgoing import Outgoing, prepare_outgoing
from tridentserve.engine.live.handoff.peer import ALREADY_HERE, CompletedTransfer, HandoffKey, Peer
from tridentserve.engine.live.handoff.shared_parcels import SharedParcels
from tridentserve.engine.live.transport.nixl_link import TRANSFER_TIMEOUT_S, NixlLink, TransferStuckError
from tridentserve.engine.live.transport.parcel import Parcel, ParcelLayout
from tridentserve.engine.live.transport.slab import SlabAllocator
from tridentserve.errors import HandoffError
from tridentserve.plans import WorkerId

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PushOutcome = Literal["sent", "already there", "failed"]

# Far more than can have a push under way when they end.
REMEMBERED_REQUESTS = 4096
# The time that a consumer waits for a parcel on its way before it asks the producer, which may have died meanwhile.
_PATIENCE_S = 0.5


class HandoffBuffer:
    """The parcels of one worker: outputs that it keeps (outbox), parcels that it has received (inbox), and state
    checkpoints that it keeps for requests that run on other workers."""

    def __init__(
        self,
        worker_id: WorkerId,
        peers: Mapping[WorkerId, Peer],
        slab: torch.Tensor,
        link: NixlLink | None,
        on_transfer: Callable[[CompletedTransfer], None] = lambda transfer: None,
    ) -> None:
        self._worker_id = worker_id
        self._peers = peers
        self._slab = slab
        self._link = link
        self._on_transfer = on_transfer
        self._allocator = SlabAllocator(slab.numel() if link is not None else 0)
        self._shared = SharedParcels(slab.device)
        self._outbox: dict[HandoffKey, Parcel] = {}
        self._inbox = Inbox(slab, self._allocator, link)
        self.checkpoints = CheckpointStore()
        self._pushes: dict[tuple[HandoffKey, WorkerId], asyncio.Task[None]] = {}
        self._stuck: set[asyncio.Task[None]] = set()
        # The last plan of requests that have ended lately, once for outputs (False) and once for checkpoints (True):
        # parcels of such plans that arrive later are dropped.
        self._ended: OrderedDict[tuple[str, bool], int] = OrderedDict()

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slab that are reserved or hold a parcel."""
        return self._allocator.used_bytes

    @property
    def num_parcels(self) -> int:
        """Number of parcels: outputs, received ones and checkpoints; 0 when no request is under way."""
        return len(self._outbox) + len(self._inbox) + len(self.checkpoints)

    # The producer's side.

    def keep_output(self, key: HandoffKey, parcel: Parcel) -> None:
        """Keep an output until `forget_request`."""
        if not self._has_ended(key):
            self._outbox[key] = parcel

    def push_output(self, key: HandoffKey, to: WorkerId) -> asyncio.Task[None]:
        """Start (or join) the push of a kept output. The task fails with `HandoffError`."""
        running = self._pushes.get((key, to))
        if running is None:
            running = asyncio.get_running_loop().create_task(self._push(key, to))
            self._pushes[key, to] = running
            running.add_done_callback(lambda task: self._end_push(key, to, task))
        return running

    def _end_push(self, key: HandoffKey, to: WorkerId, task: asyncio.Task[None]) -> None:
        self._pushes.pop((key, to), None)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the consumer asks again and gets the error there

    async def _push(self, key: HandoffKey, to: WorkerId) -> None:
        parcel, start_s = self._find_parcel(key), time.perf_counter()
        layout, peer = parcel.layout(), self._peers[to]
        outcome = await self._push_through_nixl(key, parcel, layout, peer)
        if outcome == "sent":
            self._on_transfer(CompletedTransfer("nixl", layout.nbytes, time.perf_counter() - start_s))
        if outcome != "failed":
            return
        shares_memory = peer.shares_memory and layout.nbytes > 0
        if not (shares_memory and await self._push_in_a_file(key, parcel, layout, peer)):
            buffer = await self._copy_to_host(parcel, parcel.pack, layout)
            await peer.deliver_parcel(key, layout, buffer)
        self._on_transfer(CompletedTransfer("host", layout.nbytes, time.perf_counter() - start_s))

    async def _push_in_a_file(self, key: HandoffKey, parcel: Parcel, layout: ParcelLayout, peer: Peer) -> bool:
        """Push a parcel in memory that this worker and the peer share. False where there is too little of it, or the
        peer cannot map it."""
        try:
            path, buffer = await asyncio.to_thread(self._shared.make_file, layout.nbytes)
        except OSError as error:
            logger.warning("a parcel of %d bytes goes through Ray's object store: %s", layout.nbytes, error)
            return False
        try:
            await self._copy_to_host(parcel, parcel.pack_into, buffer, layout)
            await peer.deliver_file(key, layout, path)
        except HandoffError as error:
            logger.warning("a parcel of %d bytes goes through Ray's object store: %s", layout.nbytes, error)
            return False
        finally:
            path.unlink(missing_ok=True)
        return True

    async def _copy_to_host(self, parcel: Parcel, copy: Callable[..., T], *args: object) -> T:
        """Call a function that copies a parcel to host memory, where it holds up neither the event loop nor what the
        device computes."""
        if find_device(self._slab.device).is_host:
            return await asyncio.to_thread(copy, *args)
        copied: T = await self._inbox.copies(copy, *args, after=parcel.made)
        return copied

    def _find_parcel(self, key: HandoffKey) -> Parcel:
        """An output of this worker, or a checkpoint that it keeps."""
        parcel = self._outbox.get(key) or self.checkpoints.get(key)
        if parcel is None:
            raise HandoffError(f"{self._worker_id} holds no output of plan {key.plan_id}: it has been dropped")
        return parcel

    async def _push_through_nixl(
        self, key: HandoffKey, parcel: Parcel, layout: ParcelLayout, peer: Peer
    ) -> _PushOutcome:
        """It fails where there is no room on either side, or NIXL does. A consumer that asks while the push ends
        may have the parcel before its question is here."""
        if self._link is None or peer.link_name is None:
            return "failed"
        outgoing = prepare_outgoing(parcel, layout, self._slab, self._allocator, self._inbox.copies)
        if outgoing is None:
            return "failed"
        try:
            # Before the peer keeps a slot for the bytes, and waits for them no longer than a transfer may take: what
            # the device is to do before may take minutes.
            parts = await outgoing.parts()
            target = await peer.reserve_slot(key, self._worker_id, layout)
        except BaseException:
            outgoing.close()
            raise
        if target is None or target == ALREADY_HERE:
            outgoing.close()
            return "failed" if target is None else "already there"
        ended, settled = self._link.write(peer.link_name, parts, target, key.to_note())
        try:
            await asyncio.wrap_future(ended)
        except TransferStuckError:
            self._release_when_settled(settled, key, outgoing, peer)
            return "failed"
        except HandoffError:
            outgoing.close()
            await peer.release_slot(key)
            return "failed"
        outgoing.close()
        return "sent"

    def _release_when_settled(self, settled: Future[None], key: HandoffKey, outgoing: Outgoing, peer: Peer) -> None:
        """Give both sides of a write that took too long back when its bytes can no longer move."""

        async def give_back() -> None:
            await asyncio.wrap_future(settled)
            outgoing.close()
            await peer.release_slot(key)

        task = asyncio.get_running_loop().create_task(give_back())
        self._stuck.add(task)
        task.add_done_callback(self._stuck.discard)

    async def send_output(self, key: HandoffKey, to: WorkerId) -> None:
        """A consumer asks for an output: join the push under way, or push."""
        await asyncio.shield(self.push_output(key, to))

    async def send_checkpoint(self, key: HandoffKey, state: Parcel, keeper: WorkerId) -> None:
        """Send a state checkpoint to another worker, which keeps it until the request ends or has newer ones. Raises
        `HandoffError`."""
        self.keep_output(key, state)
        try:
            await self.push_output(key, keeper)
            await self._peers[keeper].keep_checkpoint(key)
        finally:
            self._outbox.pop(key, None)

    # The consumer's side.

    async def reserve_slot(self, key: HandoffKey, producer: WorkerId, layout: ParcelLayout) -> int | None:
        # The producer hears of the end of a write before this side does.
        if await self._inbox.wait_for_arrival(key, _PATIENCE_S):
            return ALREADY_HERE
        return None if self._has_ended(key) else self._inbox.reserve_slot(key, producer, layout)

    async def release_slot(self, key: HandoffKey) -> None:
        self._inbox.free_slot(key)

    async def deliver_parcel(self, key: HandoffKey, layout: ParcelLayout, buffer: torch.Tensor) -> None:
        """Add a parcel, which owns the buffer from now on."""
        if not self._has_ended(key):
            self._inbox.add_parcel(key, Parcel.views(buffer, layout))

    async def deliver_file(self, key: HandoffKey, layout: ParcelLayout, path: Path) -> None:
        """Add a parcel that lies in a file of a peer's (see `SharedParcels`). Raises `HandoffError`."""
        try:
            buffer = await asyncio.to_thread(self._shared.open_file, path, layout.nbytes)
        except OSError as error:
            raise HandoffError(f"{self._worker_id} cannot map {path}: {error}") from error
        await self.deliver_parcel(key, layout, buffer)

    async def fetch_parcel(self, key: HandoffKey, source: WorkerId) -> Parcel:
        """The parcel with this key: made here, pushed here, or else asked for. Its slot is free again on return, or,
        where that saves a copy, when the tensors are dropped."""
        if source == self._worker_id:
            parcel = self._find_parcel(key)
            self._on_transfer(CompletedTransfer("local", parcel.nbytes, 0.0))
            return await self._inbox.bring(parcel, self._slab.device)
        if not await self._inbox.wait_for_arrival(key, _PATIENCE_S):
            await self._peers[source].send_output(key, self._worker_id)
            await self._inbox.wait_for_arrival(key, TRANSFER_TIMEOUT_S)
        return self._inbox.lend_out(key) or await self._inbox.copy_out(key, self._slab.device)

    async def keep_checkpoint(self, key: HandoffKey) -> None:
        """Keep a parcel that has arrived as the newest checkpoint of its request. Raises `HandoffError`."""
        await self._inbox.wait_for_arrival(key, TRANSFER_TIMEOUT_S)
        if not self._has_ended(key):
            checkpoint = await self._inbox.copy_out(key, torch.device("cpu"))
            if not self._has_ended(key):
                self.checkpoints.add(key, checkpoint)

    # The end of a request, and of a peer.

    def forget_request(self, request_id: str, last_plan_id: int, with_checkpoints: bool = True) -> None:
        """Drop the parcels of a request's plans up to `last_plan_id`, its checkpoints only `with_checkpoints`. A slot
        that is being written is freed later."""
        for name in ((request_id, False), (request_id, True)) if with_checkpoints else ((request_id, False),):
            self._ended[name] = max(last_plan_id, self._ended.get(name, -1))
            self._ended.move_to_end(name)
        while len(self._ended) > REMEMBERED_REQUESTS:
            self._ended.popitem(last=False)

        def is_old(key: HandoffKey) -> bool:
            return key.request_id == request_id and self._has_ended(key)

        self.checkpoints.drop_old(request_id, is_old)
        self._inbox.drop_old(is_old)
        for key in [key for key in self._outbox if is_old(key)]:
            del self._outbox[key]

    def has_left(self, request_id: str, plan_id: int) -> bool:
        """True when the request has ended since plan `plan_id` was made."""
        return self._has_ended(HandoffKey(request_id, plan_id))

    def _has_ended(self, key: HandoffKey) -> bool:
        return key.plan_id <= self._ended.get((key.request_id, key.step is not None), -1)

    def drop_peer(self, worker_id: WorkerId) -> None:
        """A peer's process has ended: slots it was writing into are free."""
        self._inbox.free_slots_of(worker_id)
