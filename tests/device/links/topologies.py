"""What `nvidia-smi` says of the GPUs of some machines, in the form in which it does."""

from __future__ import annotations

from tridentserve.cluster import DeviceLinks
from tridentserve.device.gpu_links import parse_gpu_links

_LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def write_listing(num_gpus: int) -> str:
    return "".join(f"{gpu}, 00000000:{_find_bus(gpu):02X}:00.0\n" for gpu in range(num_gpus))


def find_address(gpu: int) -> str:
    return f"00000000:{_find_bus(gpu):02x}:00.0"


def _find_bus(gpu: int) -> int:
    return 0x1A + 0x11 * gpu


def write_matrix(*rows: str, nics: int = 0, underlined: bool = False) -> str:
    """`nvidia-smi topo -m` for these rows of words, where X is the GPU itself."""
    heads = [f"GPU{gpu}" for gpu in range(len(rows))] + [f"NIC{nic}" for nic in range(nics)]
    header = "\t".join([*heads, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\t\x1b[4m{header}\x1b[0m" if underlined else f"\t{header}"]
    for gpu, row in enumerate(rows):
        words = [f" {word} " if word == "X" else word for word in row.split()] + ["NODE"] * nics
        lines.append("\t".join([f"GPU{gpu}", *words, "0-47,96-143", "0", "", "N/A"]))
    for nic in range(nics):
        lines.append("\t".join([f"NIC{nic}", *["NODE"] * (len(rows) + nics)]))
    return "\n".join(lines) + "\n" + _LEGEND


# Eight GPUs behind NVSwitches.
HGX = write_matrix(
    *(" ".join("X" if gpu == other else "NV18" for other in range(8)) for gpu in range(8)), nics=2, underlined=True
)
# Two sockets with four GPUs each. Two of the four are behind one PCIe switch, and these are not neighbors in number.
TWO_SOCKETS = write_matrix(
    "X NODE PIX NODE SYS SYS SYS SYS",
    "NODE X NODE PIX SYS SYS SYS SYS",
    "PIX NODE X NODE SYS SYS SYS SYS",
    "NODE PIX NODE X SYS SYS SYS SYS",
    "SYS SYS SYS SYS X NODE NODE PXB",
    "SYS SYS SYS SYS NODE X PXB NODE",
    "SYS SYS SYS SYS NODE PXB X NODE",
    "SYS SYS SYS SYS PXB NODE NODE X",
    nics=1,
)
# Four GPUs, with bridges of NVLink between 0 and 3, and between 1 and 2.
BRIDGES = write_matrix("X NODE SYS NV4", "NODE X NV4 SYS", "SYS NV4 X NODE", "NV4 SYS NODE X")


def list_devices(matrix: str, gpus: list[int]) -> list[DeviceLinks]:
    """The workers' own devices, of a machine that may have more."""
    listing = write_listing(8 if "GPU7" in matrix else 4)
    return [parse_gpu_links(find_address(gpu), listing, matrix) for gpu in gpus]
