"""Parcels in memory that two workers of one node share: a file in memory, which both map and page-lock for their GPUs.

The producer copies its tensors into it, and the consumer copies them from there to its device, or uses them where they
are. Nobody copies the bytes between the two processes.
"""

from __future__ import annotations

import itertools
import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch

from tridentserve.device import ComputeDevice, find_device

_SHARED_DIR = Path("/dev/shm")
_PREFIX = "tridentserve-parcel-"


class _SharedMapping(mmap.mmap):
    """The mapping of a file, which is page-locked for a device as long as it lasts, and no longer."""

    registered_by: ComputeDevice | None = None
    address = 0

    def register(self, device: ComputeDevice, buffer: torch.Tensor) -> None:
        """Page-lock it. Copies from memory that cannot be are slower, and as good."""
        if device.register_host_memory(buffer) == 0:
            self.registered_by, self.address = device, buffer.data_ptr()

    def __del__(self) -> None:
        if self.registered_by is not None:  # here the memory is still mapped
            self.registered_by.unregister_host_memory(self.address)


class SharedParcels:
    """Makes and maps the files of one worker."""

    def __init__(self, device: torch.device) -> None:
        self._device = find_device(device)
        self._numbers = itertools.count()
        self._remove_stale()

    def make_file(self, nbytes: int) -> tuple[Path, torch.Tensor]:
        """Make a file of so many bytes, more than 0, and map it: its path, and the bytes, uint8. The caller removes it:
        who has mapped it keeps its memory. Raises `OSError` where there is no room, or no such directory."""
        path = _SHARED_DIR / f"{_PREFIX}{os.getpid()}-{next(self._numbers)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # A file that only grows when it is written would end the process where no memory is left.
            os.posix_fallocate(descriptor, 0, nbytes)
            return path, self._map(descriptor, nbytes)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    def open_file(self, path: Path, nbytes: int) -> torch.Tensor:
        """The bytes of a peer's file, uint8; its memory is free when the tensor is dropped. Raises `OSError`."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            return self._map(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def _map(self, descriptor: int, nbytes: int) -> torch.Tensor:
        mapping = _SharedMapping(descriptor, nbytes)
        buffer = torch.frombuffer(mapping, dtype=torch.uint8)  # which keeps the mapping
        if not self._device.is_host:
            mapping.register(self._device, buffer)
        return buffer

    def _remove_stale(self) -> None:
        """Remove what workers that were killed have left, but for those of other users."""
        for path in _SHARED_DIR.glob(f"{_PREFIX}*"):
            process_id = path.name.removeprefix(_PREFIX).partition("-")[0]
            if not Path("/proc", process_id).exists():
                with suppress(OSError):
                    path.unlink()
