"""Workers and nodes: what there is to plan with. A node is a failure and a topology domain."""

from __future__ import annotations

from dataclasses import dataclass

from tridentserve.plans import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One device. `memory_bytes` is what replicas, activations and the handoff buffer may use together;
    `device` is the name that profile tables use (`cpu`, `NVIDIA L20`)."""

    worker_id: WorkerId
    node_id: str
    memory_bytes: int
    device: str = "cpu"
