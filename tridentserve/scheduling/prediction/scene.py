"""The beginning of a rehearsal: the workers, and the requests that are under way or wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tridentserve.scheduling.prediction.costs import RequestCosts


@dataclass(frozen=True, slots=True)
class SharingRules:
    """The options of a policy that say how it shares workers among requests. They are those of `DispatchOptions`, whose
    names they have."""

    min_efficiency: float
    horizon: float
    spare: float
    hopeless: float
    max_degree: int | None


@dataclass(slots=True)
class Rehearsed:
    """A request in a rehearsal."""

    name: str
    costs: RequestCosts
    pools: tuple[int, ...]
    """The pools whose workers hold its D."""
    decodes_in: frozenset[int]
    """Those of them that hold C too."""
    steps: int
    """Denoising steps that are left."""
    encodes: bool
    """E is to be done."""
    deadline_s: float
    patience_s: float
    """Seconds from its arrival to the deadline."""
    weight: float
    decoders: int
    """The queue of C where D's workers do not hold it."""
    whole: bool = False
    """See `RequestSpec.whole`."""
    is_late: bool = False
    """It cannot be in time any more."""

    def best_finish_s(self, now_s: float, widest: int) -> float:
        """The earliest end if it had any workers now."""
        costs = self.costs
        return now_s + min(costs.take_s(k, self.steps, self.encodes) for k in costs.step_s if k <= widest)


@dataclass(slots=True)
class RehearsedPool:
    """Workers with one placement, which hold D of some model."""

    idle: int
    widest: int
    """The most workers that a node of it has."""


@dataclass(slots=True)
class RehearsalScene:
    """All that a rehearsal begins with."""

    now_s: float
    pools: Sequence[RehearsedPool]
    decoders: Sequence[list[float]]
    """For each queue of lone C's the times at which its workers are free."""
    waiting: list[Rehearsed]
    events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    """All that is under way, by the time of its end."""
    load: float = 0.0
    """The worker-seconds that the latest arrivals need over those that there were."""
    room: int | None = None
    """Workers that may still begin to denoise, where workers share cores; None: all."""
