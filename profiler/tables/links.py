"""The speeds at which stage outputs and weights move: between workers, from the host and from disk."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tridentserve.errors import ProfileError
from tridentserve.protocols import LoadSource


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """The speeds of links, in bytes per second that one worker gets, and their latencies. Infinite speeds are allowed.

    Raises `ProfileError` for speeds that are not above 0, and for latencies that are negative or not finite.
    """

    intra_node_bytes_per_s: float
    """The speed between two workers of a node."""
    inter_node_bytes_per_s: float
    """The speed between workers of two nodes."""
    host_bytes_per_s: float
    """The speed from host memory to the device."""
    disk_bytes_per_s: float
    """The speed from the model folder to the device."""
    transfer_latency_s: float = 0.0
    """Seconds before the first byte of each stage output that moves."""
    load_latency_s: float = 0.0
    """Seconds before the first byte of each stage whose weights are loaded."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_good = value > 0 if field.name.endswith("_per_s") else 0 <= value < math.inf
            if not is_good:
                least = "above 0 (inf: no time)" if field.name.endswith("_per_s") else "at least 0 and finite"
                raise ProfileError(f"link speeds: {field.name} is {value}; it must be {least}")

    def transfer_seconds(self, num_bytes: int, same_node: bool) -> float:
        """Seconds to move the output of a stage to another worker; nothing takes no time."""
        speed = self.intra_node_bytes_per_s if same_node else self.inter_node_bytes_per_s
        return self.transfer_latency_s + num_bytes / speed if num_bytes else 0.0

    def load_seconds(self, num_bytes: int, source: LoadSource) -> float:
        """Seconds to make weights resident on a worker; nothing takes no time."""
        speed = {
            "peer": self.intra_node_bytes_per_s,
            "host": self.host_bytes_per_s,
            "disk": self.disk_bytes_per_s,
        }[source]
        return self.load_latency_s + num_bytes / speed if num_bytes else 0.0


# Nothing that moves takes time: a policy is then judged by its compute alone.
INSTANT_LINKS = LinkSpeeds(math.inf, math.inf, math.inf, math.inf)
# For devices whose table says nothing: PCIe 4.0 x16 (31.5 GB/s) and 100 Gb/s Ethernet at about 80 % of their nominal
# speeds, and one NVMe disk.
DEFAULT_LINKS = LinkSpeeds(25e9, 10e9, 25e9, 2.5e9, transfer_latency_s=0.0005, load_latency_s=0.05)
