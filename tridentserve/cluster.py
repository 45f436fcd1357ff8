"""Workers and nodes. A node is a failure domain and a topology domain."""

from __future__ import annotations

from dataclasses import dataclass

from tridentserve.plans import WorkerId


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
    (`StageTimes.unit`) are those at the places from a multiple of k on; each holds the shard of its place there."""
    max_denoising: int | None = None
    """Most workers of its node that denoise at once, where they share its cores; None: all."""
