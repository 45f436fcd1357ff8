"""First-fit allocation of slots inside one slab of fixed capacity. Pure: it hands out offsets, not memory."""

from __future__ import annotations

from tridentserve.engine.live.transport.parcel import align
from tridentserve.errors import HandoffError


class SlabAllocator:
    """Free slots are kept in order of their offset and merged with their neighbours."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._free: list[tuple[int, int]] = [(0, capacity_bytes)] if capacity_bytes else []
        self._used: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        return sum(self._used.values())

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a new slot of at least `nbytes` bytes, or None when no gap is large enough."""
        wanted = align(max(nbytes, 1))
        for index, (offset, size) in enumerate(self._free):
            if size >= wanted:
                rest = [(offset + wanted, size - wanted)] if size > wanted else []
                self._free[index : index + 1] = rest
                self._used[offset] = wanted
                return offset
        return None

    def free(self, offset: int) -> None:
        """Give a slot back. Raises `HandoffError` for an offset that is not in use."""
        if offset not in self._used:
            raise HandoffError(f"slot at offset {offset} is not in use: freed twice?")
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, (offset, self._used.pop(offset))]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged
