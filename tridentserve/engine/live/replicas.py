"""The replicas a worker holds: one pipeline adapter per model and stage, with only that stage's components loaded."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from tridentserve.engine.live.messages import ModelSource
from tridentserve.errors import CheckpointError
from tridentserve.pipelines.base import PipelineAdapter
from tridentserve.pipelines.loading import load_adapter
from tridentserve.plans import Replica


class ReplicaStore:
    """Loads replicas on first use and keeps them."""

    def __init__(self, sources: Mapping[str, ModelSource], device: str) -> None:
        self._sources = sources
        self._device = device
        self._adapters: dict[Replica, PipelineAdapter] = {}

    def load(self, replica: Replica) -> float:
        """Make a replica resident; returns the seconds it took (0 when it was)."""
        if replica in self._adapters:
            return 0.0
        source = self._sources.get(replica.model)
        if source is None:
            raise CheckpointError(f"no model named {replica.model!r}; this worker knows {sorted(self._sources)}")
        start_s = time.perf_counter()
        dtype = getattr(torch, source.dtype) if source.dtype else None
        stages = frozenset({replica.stage})
        self._adapters[replica] = load_adapter(source.folder, stages, device=self._device, dtype=dtype)
        return time.perf_counter() - start_s

    def adapter(self, replica: Replica) -> PipelineAdapter:
        self.load(replica)
        return self._adapters[replica]
