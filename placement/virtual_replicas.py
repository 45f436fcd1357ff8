"""The choice of the virtual replica that a request needs: the first of V0..V3 whose memory fits, since communication
grows with the index (TridentServe, arXiv 2510.02838, section 6.1, "Single-Request Solution")."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.units import Units
from profiler.memory import (
    compute_peak_bytes_by_degree,
    find_largest_unit,
    list_legs,
    list_ways_apart,
    sum_weights_bytes,
)
from tridentserve.errors import PlacementError
from tridentserve.plans import Replica
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.stages import PlacementType, Stage, VirtualReplica


@dataclass(frozen=True, slots=True)
class Fit:
    """A virtual replica that can run some shapes."""

    replica: VirtualReplica
    """The virtual replica."""
    min_degrees: Mapping[Shape, int]
    """The narrowest degree of D that memory allows, for each shape."""
    units: Units
    """The number of workers of each type that belong together, as they hold a stage's weights together."""

    @property
    def min_degree(self) -> int:
        """The narrowest degree that is enough for every shape."""
        return max(self.min_degrees.values())


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The memory of a worker and its use: weights of its stages (its shards, where they are divided), peak activations
    of the largest of them (D's at its degree), and the handoff reserve."""

    times: StageTimes
    """Memory and units of the stages, by the profile."""
    memory_bytes: int
    """The memory of a worker."""
    handoff_reserve_bytes: int
    """Bytes of it that the handoff buffer and the process groups take."""
    degrees: tuple[int, ...]
    """The degrees of D that a node can form, ascending."""
    largest_node: int
    """The number of workers of the largest node."""

    def unit(self, model: str, kind: PlacementType) -> int:
        """The number of workers of this type that belong together."""
        return find_largest_unit(self.times, (Replica(model, stage) for stage in kind.stages))

    def compute_needed_bytes(self, model: str, kind: PlacementType, shape: Shape) -> dict[int, int]:
        """Bytes that a worker of this type needs to run its stages at this size, per degree of D (auxiliaries run at
        degree 1, or on a unit). `ProfileError` if the size is not profiled."""
        weights_bytes = sum_weights_bytes(self.times, (Replica(model, stage) for stage in kind.stages))
        unit = self.unit(model, kind)
        degrees = [degree for degree in self.degrees if degree >= unit] if kind.is_primary else [1]
        peaks = compute_peak_bytes_by_degree(self.times, model, kind.stages, shape, degrees)
        return {degree: weights_bytes + peak + self.handoff_reserve_bytes for degree, peak in peaks.items()}

    def _find_fitting_degrees(self, model: str, kind: PlacementType, shape: Shape) -> set[int]:
        needed = self.compute_needed_bytes(model, kind, shape)
        return {degree for degree, needed_bytes in needed.items() if needed_bytes <= self.memory_bytes}

    def fit(self, model: str, replica: VirtualReplica, shapes: Sequence[Shape]) -> Fit | None:
        """The way in which this virtual replica runs these shapes; None when one of them never fits."""
        if not all(self._find_fitting_degrees(model, kind, shape) for kind in replica.auxiliaries for shape in shapes):
            return None
        fitting = {shape: self._find_fitting_degrees(model, replica.primary, shape) for shape in shapes}
        if not all(fitting.values()):
            return None
        units = {kind: self.unit(model, kind) for kind in (replica.primary, *replica.auxiliaries)}
        return Fit(replica, {shape: min(degrees) for shape, degrees in fitting.items()}, units)

    def fit_apart(self, model: str, shapes: Sequence[Shape]) -> Fit | None:
        """The way in which workers that hold all stages run these shapes, with E and C as plans of their own where
        memory asks for it; None where one of the shapes never fits so, or a stage's weights are divided."""
        units = {PlacementType.EDC: self.unit(model, PlacementType.EDC)}
        degrees = {shape: self._find_degrees_apart(model, shape) for shape in shapes}
        if units[PlacementType.EDC] > 1 or not all(degrees.values()):
            return None
        return Fit(VirtualReplica.V0, {shape: min(ways) for shape, ways in degrees.items()}, units)

    def find_stages_apart(self, model: str, shape: Shape) -> frozenset[Stage]:
        """The stages that `fit_apart` keeps apart at the narrowest degree of a shape."""
        ways = self._find_degrees_apart(model, shape)
        return ways[min(ways)]

    def _find_degrees_apart(self, model: str, shape: Shape) -> dict[int, frozenset[Stage]]:
        """The stages that are apart at each degree that fits; the first way that does."""
        found: dict[int, frozenset[Stage]] = {}
        for apart in list_ways_apart(tuple(Stage)):
            needed = dict.fromkeys(self.degrees, 0)
            for leg in list_legs(tuple(Stage), apart):
                weights_bytes = sum_weights_bytes(self.times, (Replica(model, stage) for stage in leg))
                peaks = compute_peak_bytes_by_degree(self.times, model, leg, shape, list(needed))
                needed = {degree: max(needed[degree], weights_bytes + peak) for degree, peak in peaks.items()}
            for degree, need_bytes in needed.items():
                if need_bytes + self.handoff_reserve_bytes <= self.memory_bytes:
                    found.setdefault(degree, apart)
        return found

    def find_first_fit(self, model: str, shapes: Sequence[Shape]) -> Fit:
        """The first virtual replica that runs all shapes. Raises `PlacementError` when even V3, with each stage on
        its own, does not fit; the message names the stage, the bytes it needs and those there are."""
        for replica in VirtualReplica:
            if (fit := self.fit(model, replica, shapes)) is not None:
                return fit
        self._check_weights(model, shapes)
        kinds = (PlacementType.E, PlacementType.D, PlacementType.C)
        needs = [
            (min(self.compute_needed_bytes(model, kind, shape).values()), kind, shape)
            for kind in kinds
            for shape in shapes
        ]
        needed_bytes, kind, shape = max(needs)
        raise PlacementError(
            f"{model} at {shape} fits on no worker: stage {kind} alone needs {needed_bytes} bytes (weights, "
            f"activations, {self.handoff_reserve_bytes} for the handoff buffer and process groups) and a worker has "
            f"{self.memory_bytes}; "
            f"use workers with more memory, or leave this size out"
        )

    def _check_weights(self, model: str, shapes: Sequence[Shape]) -> None:
        """Weights that exceed a worker have to be divided among several of one node (`placement.units`)."""
        usable_bytes = self.memory_bytes - self.handoff_reserve_bytes
        for stage in Stage:
            unit = self.times.unit(model, stage)
            if self.times.weights_bytes(model, stage) <= usable_bytes:
                continue
            weights_bytes = unit * self.times.weights_bytes(model, stage)
            raise PlacementError(
                f"{model}: the weights of {stage} alone are {weights_bytes} bytes and a worker has {usable_bytes} for "
                f"them; {self._explain_group(model, stage, shapes, weights_bytes, usable_bytes)}; use workers with "
                f"more memory, or a model in a smaller precision"
            )

    def _explain_group(
        self, model: str, stage: Stage, shapes: Sequence[Shape], weights_bytes: int, usable_bytes: int
    ) -> str:
        """Name the size of a group that could hold such weights together, and say why that is of no use here."""
        unit = self.times.unit(model, stage)
        degrees = [degree for degree in self.degrees if degree >= unit] if stage is Stage.DIFFUSE else [1]
        peaks = [compute_peak_bytes_by_degree(self.times, model, (stage,), shape, degrees) for shape in shapes]
        room_bytes = usable_bytes - max(min(peak.values()) for peak in peaks)
        if room_bytes <= 0:
            return "no group of them would hold them"
        size = 1 << (math.ceil(weights_bytes / room_bytes) - 1).bit_length()
        found = f"with activations, {size} of them would hold them together"
        if size > self.largest_node:
            return f"{found}, and no node has more than {self.largest_node}"
        if stage is Stage.DIFFUSE and size > self.degrees[-1]:
            return f"{found}, and degree {self.degrees[-1]} is the widest to run it"
        return (
            f"{found}, which needs `placement: auto` and a policy that plans with units of workers (a live service "
            "divides D alone)"
        )
