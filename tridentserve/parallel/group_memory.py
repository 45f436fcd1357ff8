"""The memory that process groups take from a worker's device. Only what was measured says how much: NCCL's buffers
depend on the links and on the number of members, and torch's allocator does not know of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tridentserve.device import ComputeDevice, DeviceMemory

logger = logging.getLogger(__name__)


class GroupMemory:
    """Measures the groups of one worker as they are made, from any thread."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._latest: DeviceMemory | None = None
        self.largest_bytes = 0
        """The most that one group took; 0 while none has been measured."""

    @contextmanager
    def measure(self, num_members: int) -> Iterator[None]:
        """Measure the group that is made inside. What another thread takes meanwhile outside torch's allocator, such as
        for the code of a kernel that runs for the first time, counts as the group's."""
        before = self._device.measure_memory()
        yield
        after = self._device.measure_memory()
        if before is None or after is None:
            return
        taken_bytes = after.outside_bytes - before.outside_bytes
        with self._lock:
            self._latest = after
            is_largest = taken_bytes > self.largest_bytes
            self.largest_bytes = max(taken_bytes, self.largest_bytes)
        if is_largest:
            logger.info(
                "a process group of %d takes %d bytes; %d of %d bytes of the device are outside torch's allocator",
                num_members,
                taken_bytes,
                after.outside_bytes,
                after.total_bytes,
            )

    def count_missing_bytes(self, expected_bytes: int) -> int:
        """Bytes that the device lacks to have this many for tensors, beside all that was outside torch's allocator when
        the latest group had been made, and beside one more group as large as the largest."""
        latest = self._latest
        if latest is None:
            return 0
        return max(0, expected_bytes - latest.total_bytes + latest.outside_bytes + self.largest_bytes)
