"""The protocol of a device, and of the things that it makes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tridentserve.cluster import DeviceLinks


class WorkMark(Protocol):
    """A place in the work that a thread has given to the device. What was given before it may still be under way."""

    def wait(self) -> None:
        """Have what this thread gives to the device from now on begin after the marked work. Does not block."""

    def query(self) -> bool:
        """True when the marked work has ended. Does not block."""


class CopyCall(Protocol):
    """Runs a function that copies tensors."""

    def __call__(self, copy: Callable[..., Any], *args: Any, after: WorkMark | None = None) -> Awaitable[Any]:
        """Returns what the function returns, once all that it copied is there. The copies begin when the work before
        `after` has ended."""


class LayerCopies(Protocol):
    """Copies from host memory, which the thread that computes starts and waits for."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Begin to copy into a tensor that computations given before may still read. Returns the function after which
        those given later can use it."""

    def close(self) -> None:
        """No more copies are started. One that has begun ends."""


class MemoryPeak(Protocol):
    """The memory of one plan. `begin` is called when its weights and inputs are there, `end` when it has run."""

    total_bytes: int
    """Largest memory in use meanwhile."""
    growth_bytes: int
    """Growth from `begin` to that; 0 where it cannot be measured."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device at one moment."""

    total_bytes: int
    outside_bytes: int
    """The part that torch's allocator does not have and does not know of: process groups, the context, libraries, other
    processes."""


class ComputeDevice(Protocol):
    """One device, as one process uses it."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def kind(self) -> str:
        """The word for its kind in configurations."""

    @property
    def name(self) -> str:
        """Its name in profile tables."""

    @property
    def is_host(self) -> bool:
        """Tensors are in the memory of the host: every thread may use them where they are, and waits for nothing."""

    @property
    def nixl_kind(self) -> str:
        """NIXL's word for its memory."""

    def find_nixl_obstacle(self) -> str | None:
        """The setting with which NIXL cannot register memory of the device; None where there is none."""

    @property
    def alignment_bytes(self) -> int | None:
        """torch puts each tensor at a multiple of this; None where tensors lie at any place."""

    @property
    def counts_allocations(self) -> bool:
        """`measure_allocations` can be used."""

    # Threads, streams and copies.

    def enter_thread(self) -> None:
        """Prepare the calling thread for libraries that use the device without torch."""

    def mark_work(self) -> WorkMark | None:
        """Mark the work that the calling thread has given so far; None where work has ended when its call returns."""

    def wait_for_work(self) -> None:
        """Block until the work that the calling thread has given has ended."""

    def wait_for_all_work(self) -> None:
        """Block until all work of the process has ended."""

    def make_copy_call(self, name: str) -> CopyCall:
        """A way to copy, from the event loop on. On a GPU it has a thread and a stream of its own, and what is copied
        for computations is to be handed over (`hand_over`); on a CPU the caller copies."""

    def make_side_thread(self, name: str) -> CopyCall:
        """A thread beside the one that computes, for what takes long. What it gives to the device runs beside what is
        computed."""

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Called where tensors have been made by a copy: their memory is not used again before what computes with them
        has ended."""

    def make_layer_copies(self) -> LayerCopies:
        """Copies of layers beside what computes."""

    def is_broken_by(self, error: BaseException) -> bool:
        """True when this process cannot use the device any more, as it shows after an error; another process may. To be
        called in the thread that computes."""

    # Memory.

    def make_host_buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory from and to which copies are fast."""

    def register_host_memory(self, buffer: torch.Tensor) -> int:
        """Page-lock mapped host memory. Returns an error's number, or 0; an error leaves nothing behind that later
        calls would find."""

    def unregister_host_memory(self, address: int) -> int:
        """Undo it. Returns an error's number, or 0."""

    def find_memory_id(self, tensor: torch.Tensor) -> int:
        """The number by which NIXL tells the memories of this kind apart."""

    def make_memory_peak(self) -> MemoryPeak: ...

    def measure_allocations(self, work: Callable[[], object]) -> int:
        """Bytes by which the allocator's count grows at most while `work` runs."""

    def free_cached_memory(self) -> None:
        """Give memory back that nothing uses any more."""

    def count_free_bytes(self) -> int:
        """Bytes of the device that no process has taken, after torch's own start on it."""

    def measure_memory(self) -> DeviceMemory | None:
        """Its memory now; None where processes share it, or no allocator of torch's keeps count."""

    # Computing.

    @property
    def multiplies_bfloat16(self) -> bool:
        """It has instructions for products of bfloat16 numbers."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention, and the logarithm of each query's sum of exponentials. `mask` is added, and broadcast to (batch,
        heads, queries, keys)."""

    # Groups of processes, each with a device.

    def make_backend(self, store: Any, rank: int, size: int, timeout_s: float) -> tuple[Any, Any]:
        """A backend of torch's process groups, and its kind. Raises `RuntimeError`."""

    def abort_group(self, process_group: Any) -> None:
        """End the collectives of a group that are under way, from any thread. The group cannot be used again."""

    def count_devices(self) -> int | None:
        """The number of devices of this machine; None where processes share one."""

    def find_of_rank(self, rank: int) -> str:
        """The name of the device of another process of a group of this machine, as torch names it."""

    def find_links(self) -> DeviceLinks | None:
        """The device among those of its machine; None where processes share one."""
