"""Stages, placement types and virtual replicas: the words of TridentServe (arXiv 2510.02838, section 6.1, Table 3)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Stage(StrEnum):
    """One of the three stages of a diffusion pipeline, in the order in which they run."""

    ENCODE = "encode"
    DIFFUSE = "diffuse"
    DECODE = "decode"

    @property
    def letter(self) -> str:
        """E, D or C, as in the paper (C because D is taken)."""
        return _LETTERS[self]


_LETTERS = {Stage.ENCODE: "E", Stage.DIFFUSE: "D", Stage.DECODE: "C"}


class PlacementType(StrEnum):
    """The set of stages of one model that a worker holds. EC does not exist: D dominates both."""

    EDC = "EDC"
    DC = "DC"
    ED = "ED"
    D = "D"
    E = "E"
    C = "C"

    @property
    def stages(self) -> frozenset[Stage]:
        return _STAGES[self]

    @property
    def is_primary(self) -> bool:
        """True when the type holds D."""
        return Stage.DIFFUSE in self.stages

    @classmethod
    def of(cls, stages: Iterable[Stage]) -> PlacementType | None:
        """The type with exactly these stages, or None when there is none (no stage at all, or E and C alone)."""
        wanted = frozenset(stages)
        return next((kind for kind in cls if kind.stages == wanted), None)


_STAGES = {
    kind: frozenset(stage for stage, letter in _LETTERS.items() if letter in kind.value) for kind in PlacementType
}


class VirtualReplica(StrEnum):
    """A set of workers that together cover E, D and C. Communication grows with the index (paper, Table 3)."""

    V0 = "V0"
    V1 = "V1"
    V2 = "V2"
    V3 = "V3"

    @property
    def primary(self) -> PlacementType:
        return _VIRTUAL[self][0]

    @property
    def auxiliaries(self) -> tuple[PlacementType, ...]:
        return _VIRTUAL[self][1]


_VIRTUAL: dict[VirtualReplica, tuple[PlacementType, tuple[PlacementType, ...]]] = {
    VirtualReplica.V0: (PlacementType.EDC, ()),
    VirtualReplica.V1: (PlacementType.DC, (PlacementType.E,)),
    VirtualReplica.V2: (PlacementType.ED, (PlacementType.C,)),
    VirtualReplica.V3: (PlacementType.D, (PlacementType.E, PlacementType.C)),
}
