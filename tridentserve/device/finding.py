"""From torch's name of a device to the object that knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tridentserve.device.compute_device import ComputeDevice
from tridentserve.device.cpu_device import CpuDevice
from tridentserve.device.cuda_device import CudaDevice
from tridentserve.errors import ConfigError

_KINDS: Mapping[str, Callable[[torch.device], ComputeDevice]] = {"cpu": CpuDevice, "cuda": CudaDevice}
_found: dict[torch.device, ComputeDevice] = {}

DEVICE_CHOICES = ("auto", *_KINDS)
"""Words that `choose_device` takes."""


def find_device(device: torch.device | str) -> ComputeDevice:
    """The device that torch names so; the same object each time. Raises `ConfigError` for what is neither a CPU nor a
    GPU of CUDA."""
    place = torch.device(device)
    if place not in _found:
        if place.type not in _KINDS:
            raise ConfigError(f"torch's device {place} is not supported: use {' or '.join(_KINDS)}")
        _found[place] = _KINDS[place.type](place)
    return _found[place]


def choose_device(choice: str) -> ComputeDevice:
    """The device of one of `DEVICE_CHOICES`; `auto` is the GPU where torch finds one, else the CPU. Raises
    `ConfigError` for a GPU where torch finds none."""
    gpu = find_device("cuda")
    if gpu.count_devices():
        return gpu if choice == "auto" else find_device(choice)
    if choice not in ("auto", "cpu"):
        raise ConfigError(
            f"device {choice}: torch finds no GPU here; choose cpu or auto, or install the driver of the GPU and a "
            "build of torch for CUDA"
        )
    return find_device("cpu")


def free_cached_memory() -> None:
    """Give memory back that nothing uses any more, on all devices of this process."""
    for device in _found.values():
        device.free_cached_memory()
