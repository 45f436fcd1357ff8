"""Which virtual replica a request needs: the first of V0..V3 whose memory fits, since communication grows with the
index (TridentServe, arXiv 2510.02838, section 6.1, "Single-Request Solution")."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from profiler.memory import held_weights_bytes, peak_bytes_by_degree
from tridentserve.errors import PlacementError
from tridentserve.plans import Replica
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.stages import PlacementType, Stage, VirtualReplica


@dataclass(frozen=True, slots=True)
class Fit:
    """A virtual replica that can run some shapes, and for each the narrowest degree of D that memory allows there."""

    replica: VirtualReplica
    min_degrees: Mapping[Shape, int]

    @property
    def min_degree(self) -> int:
        """The narrowest degree that is enough for every shape."""
        return max(self.min_degrees.values())


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What fits on a worker of `memory_bytes`: weights of its stages, peak activations of the largest of them (D's at
    its degree), and the handoff reserve. `degrees` are those that a node can form, ascending."""

    times: StageTimes
    memory_bytes: int
    handoff_reserve_bytes: int
    degrees: tuple[int, ...]

    def needed_bytes(self, model: str, kind: PlacementType, shape: Shape) -> dict[int, int]:
        """Bytes that a worker of this type needs to run its stages at this size, per degree of D (auxiliaries run at
        degree 1). `ProfileError` if the size is not profiled."""
        weights_bytes = held_weights_bytes(self.times, (Replica(model, stage) for stage in kind.stages))
        degrees = self.degrees if kind.is_primary else (1,)
        peaks = peak_bytes_by_degree(self.times, model, kind.stages, shape, degrees)
        return {degree: weights_bytes + peak + self.handoff_reserve_bytes for degree, peak in peaks.items()}

    def _fitting_degrees(self, model: str, kind: PlacementType, shape: Shape) -> set[int]:
        needed = self.needed_bytes(model, kind, shape)
        return {degree for degree, needed_bytes in needed.items() if needed_bytes <= self.memory_bytes}

    def fit(self, model: str, replica: VirtualReplica, shapes: Sequence[Shape]) -> Fit | None:
        """How this virtual replica runs these shapes; None when one of them never fits."""
        if not all(self._fitting_degrees(model, kind, shape) for kind in replica.auxiliaries for shape in shapes):
            return None
        fitting = {shape: self._fitting_degrees(model, replica.primary, shape) for shape in shapes}
        return Fit(replica, {s: min(degrees) for s, degrees in fitting.items()}) if all(fitting.values()) else None

    def first_fit(self, model: str, shapes: Sequence[Shape]) -> Fit:
        """The first virtual replica that runs all shapes. Raises `PlacementError` when even V3, with each stage on
        its own, does not fit; the message names the stage, the bytes it needs and those there are."""
        for replica in VirtualReplica:
            if (fit := self.fit(model, replica, shapes)) is not None:
                return fit
        self._check_weights(model)
        kinds = (PlacementType.E, PlacementType.D, PlacementType.C)
        needs = [
            (min(self.needed_bytes(model, kind, shape).values()), kind, shape) for kind in kinds for shape in shapes
        ]
        needed_bytes, kind, shape = max(needs)
        raise PlacementError(
            f"{model} at {shape} fits on no worker: stage {kind} alone needs {needed_bytes} bytes (weights, "
            f"activations, {self.handoff_reserve_bytes} for handoff) and a worker has {self.memory_bytes}; "
            f"use workers with more memory, or leave this size out"
        )

    def _check_weights(self, model: str) -> None:
        """Weights that exceed a worker would need model parallelism (appendix E.2), which no worker here runs."""
        usable_bytes = self.memory_bytes - self.handoff_reserve_bytes
        for stage in Stage:
            weights_bytes = self.times.weights_bytes(model, stage)
            if weights_bytes > usable_bytes:
                size = math.ceil(weights_bytes / usable_bytes) if usable_bytes > 0 else None
                group = f"a group of {size} of them would" if size else "no group of them would"
                raise PlacementError(
                    f"{model}: the weights of {stage} alone are {weights_bytes} bytes and a worker has {usable_bytes} "
                    f"for them; {group} hold them, but stages are not split over workers "
                    f"(model parallelism); use workers with more memory, or a model in a smaller precision"
                )
