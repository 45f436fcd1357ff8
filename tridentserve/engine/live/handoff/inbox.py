"""Received parcels, and slots of the slab that are reserved for peers that write into them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tridentserve.device import CopyCall, find_device
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.transport.nixl_link import NixlLink, mark_exception_retrieved
from tridentserve.engine.live.transport.parcel import MANY_BYTES, Parcel, ParcelLayout
from tridentserve.engine.live.transport.slab import SlabAllocator
from tridentserve.errors import HandoffError
from tridentserve.plans import WorkerId


@dataclass(slots=True)
class _InboxSlot:
    """A reserved part of the slab."""

    offset: int
    producer: WorkerId
    """The worker that writes into the slot."""
    layout: ParcelLayout
    arrived: asyncio.Future[None]
    """Done when the producer's bytes are there; fails when they will not come."""
    doomed: bool = False
    """The request has ended: the slot is freed when the producer has written."""

    @property
    def is_full(self) -> bool:
        return self.arrived.done() and self.arrived.exception() is None


class Inbox:
    """The receive side of one worker's handoff buffer. Free slots are the backpressure: a sender that gets none falls
    back to host memory."""

    def __init__(self, slab: torch.Tensor, allocator: SlabAllocator, link: NixlLink | None) -> None:
        self._slab = slab
        self._allocator = allocator
        self._link = link
        self._device = find_device(slab.device)
        self.copies: CopyCall = self._device.make_copy_call("handoff")
        """Copies from and into the slab."""
        self._slots: dict[HandoffKey, _InboxSlot] = {}
        self._host: dict[HandoffKey, Parcel] = {}

    def __len__(self) -> int:
        """Parcels, also those that are still on their way."""
        return len(self._slots) + len(self._host)

    def reserve_slot(self, key: HandoffKey, producer: WorkerId, layout: ParcelLayout) -> int | None:
        """Reserve a slot for a parcel; its offset, or None without room, or when the parcel has one already."""
        if self._link is None or key in self._slots or key in self._host:
            return None
        offset = self._allocator.allocate(layout.nbytes)
        if offset is None:
            return None
        arrived, settled = (asyncio.wrap_future(future) for future in self._link.expect(key.to_note()))
        slot = self._slots[key] = _InboxSlot(offset, producer, layout, arrived)
        arrived.add_done_callback(mark_exception_retrieved)
        settled.add_done_callback(lambda _: self._settle(key, slot))
        return offset

    def _settle(self, key: HandoffKey, slot: _InboxSlot) -> None:
        # A parcel that came too late is of no use. Until then its slot may be written into: the slot is free when the
        # producer says so, or has died.
        if self._slots.get(key) is slot and (slot.doomed or not slot.is_full):
            self.free_slot(key)

    def add_parcel(self, key: HandoffKey, parcel: Parcel) -> None:
        """Add a parcel that is in host memory."""
        self._host[key] = parcel

    async def wait_for_arrival(self, key: HandoffKey, timeout_s: float) -> bool:
        """Wait until a parcel is here, or its producer has given it up, or the time is over. Returns whether it is
        here."""
        slot = self._slots.get(key)
        if key not in self._host and slot is not None:
            await asyncio.wait({slot.arrived}, timeout=timeout_s)
            slot = self._slots.get(key)
        return key in self._host or (slot is not None and slot.is_full)

    async def copy_out(self, key: HandoffKey, device: torch.device) -> Parcel:
        """A parcel that has arrived, copied to a device. Its slot is free on return. Raises `HandoffError`."""
        parcel = self._host.pop(key, None)
        if parcel is not None:
            return await self.bring(parcel, device)
        slot = self._slots.get(key)
        if slot is None or not slot.is_full:
            raise HandoffError(f"the output of plan {key.plan_id} did not arrive")
        del self._slots[key]  # nobody else frees it meanwhile
        try:
            copied: Parcel = await self.copies(self._copy_slot, slot, device)
        finally:
            self._allocator.free(slot.offset)
        return copied

    def _copy_slot(self, slot: _InboxSlot, device: torch.device) -> Parcel:
        run = self._slab[slot.offset : slot.offset + slot.layout.nbytes]
        if find_device(device).is_host and not self._device.is_host:
            buffer = self._device.make_host_buffer(run.numel())
            buffer.copy_(run)
            return Parcel.views(buffer, slot.layout)
        parcel = Parcel.unpack(run, slot.layout, device)
        self._device.hand_over(parcel.tensors.values())
        return parcel

    async def bring(self, parcel: Parcel, device: torch.device) -> Parcel:
        """A parcel on a device; what is there already is not copied."""
        if parcel.is_on(device):
            return parcel
        brought: Parcel = await self.copies(self._copy_parcel, parcel, device, after=parcel.made)
        return brought

    def _copy_parcel(self, parcel: Parcel, device: torch.device) -> Parcel:
        there = parcel.to(device)
        self._device.hand_over(there.tensors.values())
        return there

    def lend_out(self, key: HandoffKey) -> Parcel | None:
        """A parcel that has arrived, with tensors that stay where they are; its slot is free when nothing uses them any
        more. None where a copy is as good (few bytes, a GPU) or half of the slab is in use."""
        slot, slab = self._slots.get(key), self._slab
        if slot is None or not slot.is_full or not self._device.is_host or slot.layout.nbytes < MANY_BYTES:
            return None
        if 2 * self._allocator.used_bytes > self._allocator.capacity_bytes:
            return None
        del self._slots[key]
        loop, offset = asyncio.get_running_loop(), slot.offset
        buffer = _lend(slab[offset : offset + slot.layout.nbytes], loop, lambda: self._allocator.free(offset))
        return Parcel.views(buffer, slot.layout)

    def free_slot(self, key: HandoffKey) -> None:
        """Free the slot of a parcel, into which no producer writes any more."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        if self._link is not None and not slot.is_full:
            self._link.stop_expecting(key.to_note())
        self._allocator.free(slot.offset)

    def drop_old(self, is_old: Callable[[HandoffKey], bool]) -> None:
        """Drop parcels that are of no use any more. A slot that is being written is freed later."""
        for key in [key for key in self._host if is_old(key)]:
            del self._host[key]
        for key, slot in list(self._slots.items()):
            if is_old(key):
                slot.doomed = True
                if slot.is_full:
                    self.free_slot(key)

    def free_slots_of(self, worker_id: WorkerId) -> None:
        """A peer's process has ended: slots it was writing into are free."""
        for key, slot in list(self._slots.items()):
            if slot.producer == worker_id and not slot.is_full:
                self.free_slot(key)


def _lend(part: torch.Tensor, loop: asyncio.AbstractEventLoop, give_back: Callable[[], None]) -> torch.Tensor:
    """A tensor on the memory of `part` (contiguous, uint8, on the CPU). When neither it nor any view of it is left, the
    loop calls `give_back`, whichever thread dropped the last one."""
    # torch keeps the array for as long as a tensor is on its memory.
    array = part.numpy()
    ended = weakref.finalize(array, _give_back_in_loop, loop, give_back)
    ended.atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _give_back_in_loop(loop: asyncio.AbstractEventLoop, give_back: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(give_back)
