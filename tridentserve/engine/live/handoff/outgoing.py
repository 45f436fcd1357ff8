"""Puts the bytes of a parcel where NIXL can read them: packed into the slab, or, when they are many, where they are.

On a CPU packing is a pass over memory that a large parcel need not make: its tensors are registered for the time of the
write. On a GPU packing is fast and registering slow, so there all parcels are packed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import torch

from tridentserve.device import CopyCall, find_device
from tridentserve.engine.live.transport.nixl_memory import Memory, locate_memory
from tridentserve.engine.live.transport.parcel import MANY_BYTES, Parcel, ParcelLayout
from tridentserve.engine.live.transport.slab import SlabAllocator

# Each part of a write: where its bytes are, and their offset in the receiver's slot.
Parts = Sequence[tuple[Memory, int]]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A parcel that can be written to a peer."""

    parts: Callable[[], Awaitable[Parts]]
    """Called once, before the receiver has a slot; the memory stays as it is until `close`."""
    close: Callable[[], None]
    """Called when the write has ended."""


def prepare_outgoing(
    parcel: Parcel, layout: ParcelLayout, slab: torch.Tensor, allocator: SlabAllocator, copies: CopyCall
) -> Outgoing | None:
    """Prepare a parcel to be written to a peer; None when the slab has no room for it."""
    if layout.nbytes >= MANY_BYTES and find_device(slab.device).is_host and _are_plain(parcel):

        async def locate_parts() -> Parts:
            # The parcel, and so its memory, lives as long as this function.
            return [(locate_memory(parcel.tensors[slot.name]), slot.offset) for slot in layout.slots if slot.nbytes]

        return Outgoing(locate_parts, lambda: None)
    staging = allocator.allocate(layout.nbytes)
    if staging is None:
        return None
    buffer = slab[staging : staging + layout.nbytes]

    async def pack_parts() -> Parts:
        # NIXL knows nothing of CUDA's streams: the copies have ended before it reads the bytes.
        await copies(parcel.pack_into, buffer, layout, after=parcel.made)
        return [(locate_memory(buffer), 0)]

    return Outgoing(pack_parts, lambda: allocator.free(staging))


def _are_plain(parcel: Parcel) -> bool:
    return all(tensor.is_contiguous() and find_device(tensor.device).is_host for tensor in parcel.tensors.values())
