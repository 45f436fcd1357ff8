"""A way in which some work could run, with its times; and all ways of some work, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dispatch.candidates.work import Work
from dispatch.solver.problem import GroupKind
from dispatch.workers.auxiliaries import TransferSeconds
from tridentserve.stages import PlacementType, Stage

# The primary holds the stage: no auxiliary is waited for.
MERGED_S = float("-inf")


class Candidate(NamedTuple):
    """One way in which some work could run: a group for D, and where E and C go then."""

    group: GroupKind
    """The workers of D: their pool, and the degree."""
    primary: PlacementType
    """The placement type that these workers have for the model."""
    efficient: bool
    """True where the degree is efficient enough to be used without need (`DispatchOptions.min_efficiency`)."""
    encode_s: float
    """Seconds of E; 0 for work that has its condition."""
    diffuse_s: float
    """Seconds of all steps of D that are left."""
    decode_s: float
    """Seconds of C."""
    encode_free_s: float
    """The time at which the auxiliary for E is free; minus infinity where the primary holds E."""
    decode_free_s: float
    """The time at which the auxiliary for C is free; minus infinity where the primary holds C."""
    earliest_start_s: float
    """The earliest time at which the group can be formed, now or later."""
    load_s: float = 0.0
    """Seconds in which the primaries fetch weights first."""
    condition_s: TransferSeconds = (0.0, 0.0)
    """Seconds to send the condition from E's auxiliary, within a node and between nodes. The longer one counts until
    the workers are known."""
    latents_s: TransferSeconds = (0.0, 0.0)
    """Seconds to send the latents to C's auxiliary, likewise."""
    encode_degree: int = 1
    """Number of auxiliaries that run E together. Where the primary holds E, all of its workers run it, whatever this
    says."""
    decode_degree: int = 1
    """Number of workers that run C."""
    in_tiles: bool = False
    """True where the primary has the memory for C in tiles only."""
    apart: frozenset[Stage] = frozenset()
    """E and C that are plans of their own on the primary (`Assignment.apart`)."""

    @property
    def encodes_there(self) -> bool:
        """True when E, if it is due, runs on the primary."""
        return self.encode_free_s == MERGED_S

    @property
    def decodes_there(self) -> bool:
        """True when C runs on the primary."""
        return self.decode_free_s == MERGED_S

    @property
    def run_s(self) -> float:
        """Seconds of the three stages without any waiting."""
        return self.encode_s + self.diffuse_s + self.decode_s

    def diffuse_end_s(self, start_s: float) -> float:
        """The time at which D ends if the group's workers are reserved at `start_s`."""
        encode_end_s = max(start_s, self.encode_free_s) + self.encode_s + max(self.condition_s)
        return encode_end_s + self.load_s + self.diffuse_s

    def finish_s(self, start_s: float) -> float:
        """The time at which the request ends if the group's workers are reserved at `start_s`, after the queues at its
        auxiliaries."""
        return self.finish_after_s(self.diffuse_end_s(start_s))

    def finish_after_s(self, diffuse_end_s: float) -> float:
        """`finish_s`, where it is known when D ends."""
        return max(diffuse_end_s + max(self.latents_s), self.decode_free_s) + self.decode_s

    def compute_gpu_seconds(self, start_s: float, diffuse_end_s: float) -> float:
        """Seconds for which workers are taken: all of the group until D ends (also while it waits for E), and those of
        E elsewhere and of C."""
        elsewhere_s = 0.0 if self.encodes_there else self.encode_degree * self.encode_s
        diffuse_s = self.group.degree * (diffuse_end_s - start_s)
        return diffuse_s + elsewhere_s + self.decode_degree * self.decode_s

    def with_steps(self, num_steps: int) -> Candidate:
        """A candidate of one step with so many steps of D."""
        # A tick makes thousands of them, and `_replace` takes nearly three times as long.
        return _make(Candidate, (*self[:_DIFFUSE_S], num_steps * self.diffuse_s, *self[_DIFFUSE_S + 1 :]))


_make = tuple.__new__
_DIFFUSE_S = Candidate._fields.index("diffuse_s")


@dataclass(frozen=True, slots=True)
class Survey:
    """All candidates for some work, and for each pool without one the reason."""

    candidates: tuple[Candidate, ...]
    obstacles: tuple[str, ...]


class PoolRule(Protocol):
    """Says which groups of a pool some work may use, beyond what profile and memory allow."""

    def admits(self, work: Work, candidate: Candidate) -> bool:
        """True where it may."""
