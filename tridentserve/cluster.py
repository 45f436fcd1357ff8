"""Workers and nodes. A node is a failure domain and a topology domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tridentserve.plans import WorkerId

BUDGET_SHARE = 0.95
"""The part of a GPU's free memory that is given to a worker. The rest is for what the driver and torch take beside the
tensors that are counted."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker, which has one device."""

    worker_id: WorkerId
    node_id: str
    memory_bytes: int
    """Memory that replicas, activations and the handoff buffer may use together."""
    device: str = "cpu"
    """Name of the device in profile tables (`cpu`, `NVIDIA L20`)."""
    place: int = 0
    """Its number among the workers of its node, which does not change when others are lost. The k workers of a unit
    (`StageTimes.unit`) are those at the places from a multiple of k on; each holds the shard of its place there. A live
    service numbers them so that such blocks are joined by the fastest links (`deployments.preparation.place_order`)."""
    max_denoising: int | None = None
    """Most workers of its node that denoise at once, where they share its cores; None: all."""


@dataclass(frozen=True, slots=True)
class DeviceLinks:
    """One device of a machine, and the links between it and the others."""

    address: str
    """Its address. Sorted by these, devices are in the order in which their driver numbers them."""
    closeness: Mapping[str, int] = field(default_factory=dict)
    """For the address of each other device, the kind of link to it: a larger number is a faster one. Empty where the
    links are not known."""
