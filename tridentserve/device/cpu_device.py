"""A CPU: work has ended when its call returns, and all memory is the host's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tridentserve.cluster import DeviceLinks
from tridentserve.device.backends import make_gloo
from tridentserve.device.compute_device import CopyCall, DeviceMemory, LayerCopies, MemoryPeak, WorkMark
from tridentserve.device.copy_thread import SideThread
from tridentserve.device.memory_peaks import HostMemoryPeak
from tridentserve.process.heap import give_back_freed_memory


class ThreadedLayerCopies:
    """See `LayerCopies`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="layers")

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        copying = self._thread.submit(target.copy_, source)

        def wait() -> None:
            copying.result()

        return wait

    def close(self) -> None:
        self._thread.shutdown()


async def copy_at_once(copy: Callable[..., Any], *args: Any, after: WorkMark | None = None) -> Any:
    """See `CopyCall`. Another thread would take its time from the same cores."""
    return copy(*args)


class CpuDevice:
    """See `ComputeDevice`."""

    kind = "cpu"
    is_host = True
    nixl_kind = "DRAM"
    alignment_bytes: int | None = None
    counts_allocations = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @property
    def name(self) -> str:
        return self.kind

    def enter_thread(self) -> None:
        pass

    def mark_work(self) -> WorkMark | None:
        return None

    def wait_for_work(self) -> None:
        pass

    def wait_for_all_work(self) -> None:
        pass

    def make_copy_call(self, name: str) -> CopyCall:
        return copy_at_once

    def make_side_thread(self, name: str) -> CopyCall:
        return SideThread(name)

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def make_layer_copies(self) -> LayerCopies:
        return ThreadedLayerCopies()

    def is_broken_by(self, error: BaseException) -> bool:
        return False

    def make_host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def register_host_memory(self, buffer: torch.Tensor) -> int:
        return 0

    def unregister_host_memory(self, address: int) -> int:
        return 0

    def find_nixl_obstacle(self) -> str | None:
        return None

    def find_memory_id(self, tensor: torch.Tensor) -> int:
        return 0

    def make_memory_peak(self) -> MemoryPeak:
        return HostMemoryPeak()

    def measure_allocations(self, work: Callable[[], object]) -> int:
        raise NotImplementedError("torch does not count the allocations of a CPU")

    def free_cached_memory(self) -> None:
        give_back_freed_memory()

    def count_free_bytes(self) -> int:
        raise NotImplementedError("processes share the memory of the host")

    def measure_memory(self) -> DeviceMemory | None:
        return None

    @property
    def multiplies_bfloat16(self) -> bool:
        return bool(torch.cpu.get_capabilities().get("avx512_bf16"))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scale
        )
        return output, log_sum

    def make_backend(self, store: Any, rank: int, size: int, timeout_s: float) -> tuple[Any, Any]:
        return make_gloo(store, rank, size, timeout_s)

    def abort_group(self, process_group: Any) -> None:
        """Gloo's abort leaves the connections open; they close with the last reference to the group."""

    def count_devices(self) -> int | None:
        return None

    def find_of_rank(self, rank: int) -> str:
        return str(self.torch_device)

    def find_links(self) -> DeviceLinks | None:
        return None
