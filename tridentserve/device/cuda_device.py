"""A GPU of CUDA: work is queued on streams, and host memory that it reads fast is page-locked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional

from tridentserve.cluster import DeviceLinks
from tridentserve.device.backends import make_nccl
from tridentserve.device.compute_device import CopyCall, DeviceMemory, LayerCopies, MemoryPeak, WorkMark
from tridentserve.device.copy_thread import CopyThread
from tridentserve.device.gpu_links import read_gpu_links
from tridentserve.device.memory_errors import is_out_of_memory
from tridentserve.device.memory_peaks import AllocatorPeak

# torch allocates every tensor at a multiple of this.
_ALIGNMENT_BYTES = 512
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# The attention kernel reads masks whose rows begin at multiples of so many numbers.
_MASK_ALIGNMENT = 16


class StreamedLayerCopies:
    """See `LayerCopies`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(target.device))  # what reads the target has been launched before
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            copied = stream.record_event()
        return lambda: copied.wait(torch.cuda.current_stream(target.device))

    def close(self) -> None:
        pass


class CudaDevice:
    """See `ComputeDevice`. Computations are on the default stream, whichever thread gives them."""

    kind = "cuda"
    is_host = False
    nixl_kind = "VRAM"
    alignment_bytes: int | None = _ALIGNMENT_BYTES
    counts_allocations = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._probing: torch.cuda.Stream | None = None

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def enter_thread(self) -> None:
        """Give the thread the device's CUDA context. Without one UCX copies the memory of GPUs through the host."""
        index = self.torch_device.index
        torch.cuda.set_device(torch.cuda.current_device() if index is None else index)

    def mark_work(self) -> WorkMark | None:
        mark: WorkMark = torch.cuda.current_stream(self.torch_device).record_event()
        return mark

    def wait_for_work(self) -> None:
        torch.cuda.current_stream(self.torch_device).synchronize()

    def wait_for_all_work(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def make_copy_call(self, name: str) -> CopyCall:
        return CopyThread(self, name)

    def make_side_thread(self, name: str) -> CopyCall:
        return CopyThread(self, name)

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        computing = torch.cuda.default_stream(self.torch_device)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(computing)

    def make_layer_copies(self) -> LayerCopies:
        return StreamedLayerCopies(self.make_stream())

    def make_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def is_broken_by(self, error: BaseException) -> bool:
        """After an illegal access, an assertion or a launch that failed in a kernel, after an uncorrectable error of
        memory, or when the GPU is off the bus, all later calls of the process fail; other errors are of one call only.
        The probe has a stream of its own, as those of a group may hang."""
        if is_out_of_memory(error):
            return False
        self._drain_error()
        try:
            self._probing = self._probing or self.make_stream()
            with torch.cuda.stream(self._probing):
                torch.zeros(1, device=self.torch_device).item()
        except RuntimeError as failure:  # `torch.AcceleratorError` is one
            return not is_out_of_memory(failure)
        return False

    def make_host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def register_host_memory(self, buffer: torch.Tensor) -> int:
        error = int(_cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
        if error != 0:
            self._drain_error()
        return error

    def unregister_host_memory(self, address: int) -> int:
        error = int(_cudart().cudaHostUnregister(address))
        if error != 0:
            self._drain_error()
        return error

    def _drain_error(self) -> None:
        """CUDA keeps the error of a failed call until somebody asks, and the next launch of this thread would raise
        it in place of its own."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)

    def find_nixl_obstacle(self) -> str | None:
        """Expandable segments are mapped piece by piece, which UCX cannot register."""
        for name in _ALLOCATOR_SETTINGS:
            if re.search(r"expandable_segments\s*:\s*true", os.environ.get(name, ""), re.IGNORECASE):
                return f"{name} with expandable_segments"
        return None

    def find_memory_id(self, tensor: torch.Tensor) -> int:
        return tensor.get_device()

    def make_memory_peak(self) -> MemoryPeak:
        return AllocatorPeak(self.torch_device)

    def measure_allocations(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.torch_device)
        before_bytes = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        work()
        torch.cuda.synchronize(self.torch_device)
        return int(torch.cuda.max_memory_allocated(self.torch_device) - before_bytes)

    def free_cached_memory(self) -> None:
        torch.cuda.empty_cache()

    def count_free_bytes(self) -> int:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free_bytes)

    def measure_memory(self) -> DeviceMemory | None:
        while True:  # until no other thread has made torch's allocator take or give back memory in between
            reserved_bytes = torch.cuda.memory_reserved(self.torch_device)
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
            if torch.cuda.memory_reserved(self.torch_device) == reserved_bytes:
                return DeviceMemory(total_bytes, total_bytes - free_bytes - reserved_bytes)

    @property
    def multiplies_bfloat16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        aligned = None if mask is None else _align(mask).expand(*query.shape[:3], key.shape[2])
        output, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, aligned, compute_log_sumexp=True, scale=scale
        )
        return output, log_sum[..., : query.shape[2]]

    def make_backend(self, store: Any, rank: int, size: int, timeout_s: float) -> tuple[Any, Any]:
        return make_nccl(store, rank, size, timeout_s)

    def abort_group(self, process_group: Any) -> None:
        process_group.abort()  # ncclCommAbort: also what runs on the device ends

    def count_devices(self) -> int | None:
        return torch.cuda.device_count()

    def find_of_rank(self, rank: int) -> str:
        return f"cuda:{rank}"

    def find_links(self) -> DeviceLinks | None:
        gpu: Any = torch.cuda.get_device_properties(self.torch_device)
        return read_gpu_links(f"{gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


def _align(mask: torch.Tensor) -> torch.Tensor:
    keys = mask.shape[-1]
    return functional.pad(mask, (0, -keys % _MASK_ALIGNMENT))[..., :keys]


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
