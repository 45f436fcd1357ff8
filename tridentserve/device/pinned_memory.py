"""Host memory that CUDA has page-locked, from which copies to the GPU are several times as fast.

Memory that is unmapped while it is registered does silent harm: a later mapping at its address is refused, or read
through the old pages. So one object registers and unregisters, and keeps what it has registered alive.
"""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path

import torch

from tridentserve.device.compute_device import ComputeDevice

logger = logging.getLogger(__name__)

# The file systems that keep files in memory. Linux does not let a device hold on to pages of files on others.
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


class PinnedMemory:
    """The memory that one process has page-locked for one device. On a CPU there is none."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device
        self._registered: dict[int, torch.Tensor] = {}  # by address
        # An owner that is dropped lets go as well. At the end of a process the driver does it.
        weakref.finalize(self, _unregister_all, device, self._registered).atexit = False

    def pin(self, buffer: torch.Tensor, path: Path) -> bool:
        """Page-lock the mapped bytes of a file. False, and a warning that names the remedy, where that cannot be."""
        if self._device.is_host:
            return False
        if buffer.data_ptr() in self._registered:
            return True
        if (kind := find_file_system(path)) not in _IN_MEMORY:
            logger.warning(
                "weights in %s cannot be pinned, as it is on %s: loads take several times as long; name a directory in "
                "memory, such as /dev/shm, as host_dir",
                path.parent,
                kind or "a file system of unknown kind",
            )
            return False
        error = self._device.register_host_memory(buffer)
        if error != 0:
            logger.warning("weights in %s cannot be pinned (CUDA error %d): loads take longer", path.parent, error)
            return False
        self._registered[buffer.data_ptr()] = buffer
        return True

    def unpin(self, buffer: torch.Tensor) -> None:
        """Let go of memory before it is unmapped. It need not be pinned."""
        if (registered := self._registered.pop(buffer.data_ptr(), None)) is not None:
            _unregister_all(self._device, {registered.data_ptr(): registered})


def _unregister_all(device: ComputeDevice, registered: dict[int, torch.Tensor]) -> None:
    while registered:
        address, buffer = registered.popitem()
        error = device.unregister_host_memory(address)
        if error != 0:
            logger.error("CUDA did not unpin %d bytes of weights (error %d)", buffer.numel(), error)


def find_file_system(path: Path) -> str:
    """The kind of file system that a path is on, such as `ext4`; empty where Linux does not say."""
    target, found, longest = os.path.realpath(path), "", -1
    for line in _read_mounts().splitlines():
        _, place, kind, *_ = line.split()
        place = place.replace("\\040", " ")
        if len(place) > longest and (target == place or target.startswith(place.rstrip("/") + "/")):
            found, longest = kind, len(place)
    return found


def _read_mounts() -> str:
    mounts = Path("/proc/mounts")
    return mounts.read_text() if mounts.exists() else ""
