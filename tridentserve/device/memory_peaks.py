"""Measures the memory that a plan takes on its worker: by the allocator on a GPU, by the process's size on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# Written to `clear_refs`, this makes the largest size of the process so far its present size (Linux, proc(5)).
_RESET_PEAK = "5"


class AllocatorPeak:
    """See `MemoryPeak`."""

    def __init__(self, torch_device: torch.device) -> None:
        self._device = torch_device
        self._before_bytes: int | None = None
        self.total_bytes = 0
        self.growth_bytes = 0

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before_bytes = torch.cuda.memory_allocated(self._device)

    def end(self) -> None:
        self.total_bytes = torch.cuda.max_memory_allocated(self._device)
        if self._before_bytes is not None:
            self.growth_bytes = max(self.total_bytes - self._before_bytes, 0)


class HostMemoryPeak:
    """See `MemoryPeak`. Memory that the process had taken before and uses again does not count as growth."""

    def __init__(self) -> None:
        self._before_bytes: int | None = None
        self.total_bytes = 0
        self.growth_bytes = 0

    def begin(self) -> None:
        try:
            _CLEAR.write_text(_RESET_PEAK)
            self._before_bytes = _read_status_bytes("VmRSS")
        except OSError:  # no such file but on Linux; some containers forbid it
            self._before_bytes = None

    def end(self) -> None:
        if _STATUS.exists():
            self.total_bytes = _read_status_bytes("VmHWM")
        if self._before_bytes is not None:
            self.growth_bytes = max(self.total_bytes - self._before_bytes, 0)


def _read_status_bytes(key: str) -> int:
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words and words[0] == f"{key}:"), 0)
