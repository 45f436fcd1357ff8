"""A device that writes down what is asked of it, in order, and computes on the CPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from tridentserve.device import WorkMark, finding
from tridentserve.device.cpu_device import CpuDevice

CPU = torch.device("cpu")
OUT_OF_MEMORY = 2


class RecordingMark:
    def __init__(self, calls: list[str], number: int) -> None:
        self._calls, self.number, self.has_ended = calls, number, True

    def query(self) -> bool:
        return self.has_ended

    def wait(self) -> None:
        self._calls.append(f"wait for mark {self.number}")


class RecordingDevice(CpuDevice):
    """Like a GPU it has a thread for copies, and work that is to be waited for."""

    kind = "cuda"
    is_host = False
    alignment_bytes = 512

    def __init__(self) -> None:
        super().__init__(CPU)
        self.calls: list[str] = []
        self.registered: dict[int, int] = {}
        self.host_buffers: list[torch.Tensor] = []
        self.error = 0
        self.held = threading.Event()  # copies begin when it is set
        self.held.set()
        self.breaking: type[Exception] | None = None  # errors after which it cannot be used
        self._num_marks = 0

    def enter_thread(self) -> None:
        self.calls.append(f"enter thread {threading.current_thread().name}")

    def mark_work(self) -> WorkMark | None:
        self._num_marks += 1
        self.calls.append(f"mark {self._num_marks}")
        return RecordingMark(self.calls, self._num_marks)

    def wait_for_work(self) -> None:
        self.calls.append("wait for work")

    def is_broken_by(self, error: BaseException) -> bool:
        return self.breaking is not None and isinstance(error, self.breaking)

    def make_copy_call(self, name: str) -> RecordingCopies:
        return RecordingCopies(self, name)

    def make_side_thread(self, name: str) -> RecordingCopies:
        return RecordingCopies(self, name)

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        self.calls.append(f"hand over {len(list(tensors))}")

    def make_host_buffer(self, nbytes: int) -> torch.Tensor:
        self.host_buffers.append(super().make_host_buffer(nbytes))
        return self.host_buffers[-1]

    def register_host_memory(self, buffer: torch.Tensor) -> int:
        assert buffer.data_ptr() not in self.registered
        if not self.error:
            self.registered[buffer.data_ptr()] = buffer.numel()
        return self.error

    def unregister_host_memory(self, address: int) -> int:
        del self.registered[address]
        return 0

    def free_cached_memory(self) -> None:
        self.calls.append("free cached memory")


class RecordingCopies:
    """See `CopyCall`."""

    def __init__(self, device: RecordingDevice, name: str) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def __call__(self, copy: Callable[..., Any], *args: Any, after: WorkMark | None = None) -> Any:
        def run() -> Any:
            self._device.held.wait(10)
            if after is not None:
                after.wait()
            self._device.calls.append("copy")
            return copy(*args)

        return await asyncio.get_running_loop().run_in_executor(self._pool, run)


@contextmanager
def use_recording_device(device: RecordingDevice | None = None) -> Iterator[RecordingDevice]:
    """What this process computes on the CPU meanwhile, it believes to be on a device of its own."""
    former, device = finding.find_device(CPU), device or RecordingDevice()
    finding._found[CPU] = device
    try:
        yield device
    finally:
        finding._found[CPU] = former
