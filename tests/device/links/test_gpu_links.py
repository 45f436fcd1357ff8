"""The links of a GPU as `nvidia-smi` tells them, and what is done where it does not."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.device.links.topologies import BRIDGES, HGX, TWO_SOCKETS, find_address, list_devices, write_listing
from tridentserve.cluster import DeviceLinks
from tridentserve.device import find_device
from tridentserve.device.cuda_device import CudaDevice
from tridentserve.device.gpu_links import parse_gpu_links


def test_faster_links_have_larger_numbers() -> None:
    (gpu,) = list_devices(TWO_SOCKETS, [0])
    close = [gpu.closeness[find_address(other)] for other in (4, 1, 2)]  # SYS, NODE, PIX
    assert close == sorted(set(close))
    (bridged,) = list_devices(BRIDGES, [0])
    assert bridged.closeness[find_address(3)] > max(close)
    (switched,) = list_devices(HGX, [5])
    assert set(switched.closeness) == {find_address(other) for other in range(8) if other != 5}
    assert len(set(switched.closeness.values())) == 1
    assert switched.closeness[find_address(0)] > bridged.closeness[find_address(3)], "18 links, not 4"


def test_a_gpu_that_is_not_listed_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no row for 00000000:ff:00\.0"):
        parse_gpu_links("00000000:ff:00.0", write_listing(4), BRIDGES)
    with pytest.raises(ValueError, match="no row"):
        parse_gpu_links(find_address(0), write_listing(4), "")


def test_a_worker_on_a_gpu_says_which_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own is number 0 to torch, whichever it is on the machine."""
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A + 0x11 * 2, pci_device_id=0)
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout=BRIDGES if "topo" in command else write_listing(4))

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(subprocess, "run", run)
    device = CudaDevice(torch.device("cuda"))
    (expected,) = list_devices(BRIDGES, [2])
    assert device.find_links() == expected
    assert [command[0] for command in asked] == ["nvidia-smi"] * 2

    def fail(command: list[str], **options: Any) -> Any:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", fail)
    assert device.find_links() == DeviceLinks(find_address(2))


def test_processes_on_a_cpu_share_it() -> None:
    assert find_device("cpu").find_links() is None
