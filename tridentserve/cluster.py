"""Workers and nodes: what there is to plan with. A node is a failure and a topology domain."""

from __future__ import annotations

from dataclasses import dataclass

from tridentserve.plans import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One device. `memory_bytes` is what replicas, activations and the handoff buffer may use together;
    `device` is the name that profile tables use (`cpu`, `NVIDIA L20`). `place` is its number among the workers of its
    node, and stays its own when others are lost: k workers that hold a stage's weights together (`StageTimes.unit`) are
    those at the places from a multiple of k on, and each has the shard of its place in that block."""

    worker_id: WorkerId
    node_id: str
    memory_bytes: int
    device: str = "cpu"
    place: int = 0
