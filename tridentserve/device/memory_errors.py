"""Errors that say that memory ran out, whoever raised them.

A plan that meets one is neither given up at once nor tried again as it was: what nothing uses is freed, E and C are
done again with less (`StageExecutor`), and then the worker makes room, remembers the peak that it saw, and the plan's
requests are tried again (`PlanRunner`).
"""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException | None) -> bool:
    """True when the GPU's or the host's memory ran out; torch has no class of its own for the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def describe_out_of_memory(error: BaseException) -> str:
    """The first sentences of the error: the rest of what torch says are its own figures and advice."""
    return ". ".join(str(error).split(". ")[:2]).strip() or type(error).__name__
