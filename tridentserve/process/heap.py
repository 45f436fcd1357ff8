"""Memory of the host that torch has freed stays in the process, for the next tensors."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from tridentserve.byte_sizes import MIB

# Larger than most tensors of a layer.
_KEPT_BYTES = 256 * MIB
# For each variable that glibc reads when a process starts: the number of the same option of `mallopt`, and its value.
# Freed memory goes back to the system when this much of it lies at the heap's end, larger tensors have memory of their
# own, the heap grows by steps, and all threads share one.
_OPTIONS = {
    "MALLOC_TRIM_THRESHOLD_": (-1, _KEPT_BYTES),
    "MALLOC_TOP_PAD_": (-2, 64 * MIB),
    "MALLOC_MMAP_THRESHOLD_": (-3, _KEPT_BYTES),
    "MALLOC_ARENA_MAX": (-8, 1),
}


def list_heap_variables() -> dict[str, str]:
    """The variables for processes that compute on a CPU, but for those that are set in this one. By default glibc gives
    large tensors back to the system, and those of the next layer come page by page, which takes a third of the time of
    a VAE's decoder. Other C libraries do not read them."""
    return {name: str(value) for name, (_, value) in _OPTIONS.items() if name not in os.environ}


def keep_freed_memory() -> None:
    """The same for the main thread of this process, which has started without these variables."""
    if (set_option := _find_function("mallopt")) is not None:
        for name in list_heap_variables():
            set_option(*_OPTIONS[name])


def give_back_freed_memory() -> None:
    """Give the system what is kept, also from between what is in use."""
    if (trim := _find_function("malloc_trim")) is not None:
        trim(0)


@cache
def _find_function(name: str) -> Any:
    """A function of the C library; None where it has no such function."""
    return getattr(ctypes.CDLL(None), name, None)
