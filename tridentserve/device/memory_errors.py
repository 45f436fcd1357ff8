"""Errors that say that memory ran out, whoever raised them.

A plan that meets one is neither given up at once nor tried again as it was: what nothing uses is freed, E and C are
done again with less (`StageExecutor`), and then the worker makes room, remembers the peak that it saw, and the plan's
requests are tried again (`PlanRunner`).
"""

from __future__ import annotations

import re

import torch

from tridentserve.errors import GroupError

# Only torch's own allocators raise `torch.OutOfMemoryError`. These are the words of the others: of the allocator of the
# host; of CUDA's runtime and driver, and of Triton, with cudaGetErrorString; of its libraries, by the name of their
# status (that of cuDNN 9 is longer); of NCCL, which adds the number of CUDA's error, and allocates by itself.
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator"
    r"|(CUDA|CUDA driver|Triton) error( \[CUDA\])?: out of memory"
    r"|CU[A-Z]+_(STATUS_)?(INTERNAL_ERROR_(DEVICE|HOST)_)?ALLOC(ATION)?_FAILED"
    r"|cuda failure( \d+)? '?out of memory"
    r"|failed to cuda (host )?[cm]?alloc",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """True when the GPU's or the host's memory ran out, also where that is why a group of processes has failed. torch
    has no class of its own for the host, nor for what it hears from CUDA and its libraries."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, GroupError):
        return is_out_of_memory(error.__cause__)
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def describe_out_of_memory(error: BaseException) -> str:
    """The first sentences of the error: the rest of what torch says are its own figures and advice."""
    return ". ".join(str(error).split(". ")[:2]).strip() or type(error).__name__
