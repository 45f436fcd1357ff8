"""The slab allocator never hands out the same byte twice, and loses none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridentserve.engine.live.transport.parcel import align
from tridentserve.engine.live.transport.slab import SlabAllocator
from tridentserve.errors import HandoffError


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=60))
def test_slots_never_overlap_and_all_bytes_come_back(actions: list[tuple[bool, int]]) -> None:
    slab = SlabAllocator(8192)
    used: dict[int, int] = {}
    for is_allocation, number in actions:
        if is_allocation:
            offset = slab.allocate(number)
            if offset is not None:
                end = offset + align(max(number, 1))
                assert end <= slab.capacity_bytes
                assert all(end <= other or other + size <= offset for other, size in used.items())
                used[offset] = end - offset
        elif used:
            offset = sorted(used)[number % len(used)]
            del used[offset]
            slab.free(offset)
        assert slab.used_bytes == sum(used.values())
    for offset in used:
        slab.free(offset)
    assert slab.allocate(8192) == 0  # one gap again, as large as the slab


def test_a_full_slab_says_so_and_a_slot_is_not_freed_twice() -> None:
    slab = SlabAllocator(128)
    offset = slab.allocate(100)
    assert offset == 0
    assert slab.allocate(1) is None
    slab.free(offset)
    with pytest.raises(HandoffError, match="not in use"):
        slab.free(offset)
    assert SlabAllocator(0).allocate(1) is None
