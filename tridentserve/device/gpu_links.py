"""The links between the GPUs of a machine, as `nvidia-smi` tells them: NVLink, PCIe switches, NUMA nodes.

Unlike torch, `nvidia-smi` also knows the GPUs that `CUDA_VISIBLE_DEVICES` hides from this process.
"""

from __future__ import annotations

import logging
import re
import subprocess

from tridentserve.cluster import DeviceLinks

_TOOL = "nvidia-smi"
_LIST_GPUS = ("--query-gpu=index,pci.bus_id", "--format=csv,noheader")
_SHOW_LINKS = ("topo", "-m")
_TIMEOUT_S = 30.0
# The words for paths over PCIe, the slowest first: between sockets, between host bridges of one NUMA node, over a host
# bridge, over several switches, over one.
_PCIE_PATHS = ("SYS", "NODE", "PHB", "PXB", "PIX")
_NVLINKS = re.compile(r"NV(\d+)")
_GPU = re.compile(r"GPU\d+")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")

logger = logging.getLogger(__name__)


def read_gpu_links(address: str) -> DeviceLinks:
    """The GPU at an address of the PCI bus, with no links where they cannot be read."""
    try:
        return parse_gpu_links(address, _ask(*_LIST_GPUS), _ask(*_SHOW_LINKS))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.warning("%s does not tell the links of GPU %s: %s", _TOOL, address, error)
        return DeviceLinks(address)


def _ask(*arguments: str) -> str:
    return subprocess.run([_TOOL, *arguments], check=True, capture_output=True, text=True, timeout=_TIMEOUT_S).stdout


def parse_gpu_links(address: str, listing: str, matrix: str) -> DeviceLinks:
    """The links of one GPU. `listing` has the number and the address of each GPU; `matrix` is what `nvidia-smi topo -m`
    writes. Raises `ValueError` where they do not have the GPU."""
    pairs = (line.split(",") for line in listing.splitlines() if line.strip())
    addresses = {f"GPU{number.strip()}": found.strip().lower() for number, found in pairs}
    rows = [words for line in _COLORS.sub("", matrix).splitlines() if (words := line.split()) and _GPU.match(words[0])]
    own = next((name for name, found in addresses.items() if found == address), None)
    row = next((words[1:] for words in rows[1:] if words[0] == own), None)
    if row is None:
        raise ValueError(f"no row for {address}, which is {own}, in {matrix!r}")
    links = {name: word for name, word in zip(rows[0], row, strict=False) if name in addresses and name != own}
    return DeviceLinks(address, {addresses[name]: _rate(word) for name, word in links.items()})


def _rate(word: str) -> int:
    if (bonded := _NVLINKS.fullmatch(word)) is not None:
        return len(_PCIE_PATHS) + int(bonded[1])
    return _PCIE_PATHS.index(word) if word in _PCIE_PATHS else 0
