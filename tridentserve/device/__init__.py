"""All that differs between a CPU and a GPU of CUDA: streams and events, page-locked memory, figures of memory, running
out of it, NIXL's words for memory, process groups.

`ComputeDevice` is the protocol, with one implementation for each of the two; `find_device` gives that of a torch
device, and `choose_device` the GPU where there is one. Nothing outside this directory asks which of them it has
(`tests/test_house_rules.py`).
"""

from tridentserve.device.compute_device import ComputeDevice, CopyCall, DeviceMemory, MemoryPeak, WorkMark
from tridentserve.device.finding import DEVICE_CHOICES, choose_device, find_device, free_cached_memory

__all__ = [
    "DEVICE_CHOICES",
    "ComputeDevice",
    "CopyCall",
    "DeviceMemory",
    "MemoryPeak",
    "WorkMark",
    "choose_device",
    "find_device",
    "free_cached_memory",
]
