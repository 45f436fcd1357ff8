"""Parts of the handoff slab that others use for a while, as tensors of their own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

import torch


def lent(part: torch.Tensor, loop: asyncio.AbstractEventLoop, give_back: Callable[[], None]) -> torch.Tensor:
    """A tensor on the memory of `part` (contiguous, uint8, on the CPU). Once neither it nor any view of it is left,
    whichever thread drops the last one, the loop calls `give_back`."""
    # torch keeps the array for as long as a tensor is on its memory.
    array = part.numpy()
    ended = weakref.finalize(array, _tell, loop, give_back)
    ended.atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _tell(loop: asyncio.AbstractEventLoop, give_back: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(give_back)
