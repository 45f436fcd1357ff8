"""The memory of stages as an immutable table, for a thread other than the one that a cost model belongs to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from profiler.tables.device_profile import DeviceProfile
from tridentserve.requests import Shape
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """What profile tables say of one device (the protocol `tridentserve.protocols.StageMemory`), for models whose
    weights are on one worker each. Nothing in it ever changes."""

    profile: DeviceProfile

    def degrees(self, model: str, stage: Stage) -> tuple[int, ...]:
        """The degrees that were profiled, ascending. `ProfileError` if the model is unknown."""
        return self.profile.degrees(model, stage)

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        """Peak activation bytes on one worker, weights not counted. `ProfileError` if unknown."""
        sizes, scale = self.profile.find(model, stage, shape, degree, batch)
        return math.ceil(scale * sizes.peak_bytes(shape))
