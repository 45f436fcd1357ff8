"""Peak activation bytes of a piece of work: the allocator's own count on CUDA, live tensor storages on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tridentserve.device import find_device


def measure_peak_bytes(work: Callable[[], object], inputs: Mapping[str, torch.Tensor], device: torch.device) -> int:
    """Peak bytes while `work` runs: its inputs, and all that it makes and has not yet let go. Weights do not count."""
    held_bytes: int = sum(tensor.untyped_storage().nbytes() for tensor in inputs.values())
    if find_device(device).counts_allocations:
        return held_bytes + find_device(device).measure_allocations(work)
    with _LiveStorages(inputs) as live:
        work()
    return int(held_bytes + live.peak_bytes)


def count_free_bytes(device: str) -> int:
    """Bytes of the memory of a GPU that no process has taken, after torch's own start on it."""
    return find_device(device).count_free_bytes()


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its mode untyped
    """Counts the bytes of the storages that operators make inside, while they live.

    Scratch memory that an operator takes and frees within itself is not seen; the CPU kernels used here (fused
    attention, convolution) keep that small compared with their outputs.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live_bytes = 0
        self._seen: set[int] = set()
        # Views of inputs (and weights, which are arguments of operators) are not new memory.
        for tensor in inputs.values():
            self._watch(tensor, counts=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in tree_leaves((args, kwargs or {})):
            if isinstance(argument, torch.Tensor):
                self._watch(argument, counts=False)
        result = func(*args, **(kwargs or {}))
        for output in tree_leaves(result):
            if isinstance(output, torch.Tensor):
                self._watch(output, counts=True)
        return result

    def _watch(self, tensor: torch.Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes() if counts else 0
        if key in self._seen:
            return
        self._seen.add(key)
        self._live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self._live_bytes -= nbytes
