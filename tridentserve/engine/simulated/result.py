"""The result of a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tridentserve.plans import PlacementPlan, StageSpan, WorkerId
from tridentserve.requests import Quality, RequestSpec
from tridentserve.stages import Stage, VirtualReplica

PlanOutcome = Literal["finished", "yielded", "stopped", "failed", "unfinished"]

FINISHED = "finished"
# The simulation ended before the request did.
UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The result of one request."""

    spec: RequestSpec
    arrival_s: float
    end_s: float | None
    """None when it has not ended."""
    slo_s: float | None
    """Seconds from arrival to the deadline: the scheduler's when it finished, else the request's own."""
    outcome: str
    """ "finished", the code of its error, or "unfinished"."""
    retries: int
    virtual_replica: VirtualReplica | None
    """Says which stages shared workers with its D; None unless it finished."""
    error: str | None = None
    start_s: float | None = None
    """The time at which its first stage since its last retry began; None when none has ended."""
    timeline: tuple[StageSpan, ...] = ()
    """Its stages as they ran since its last retry, when plans are kept."""
    predicted_s: float | None = None
    """The latency that was predicted when it arrived; None where none was."""
    reduced_steps: int | None = None
    """The denoising steps with which it was made where they were fewer than asked for (`on_late: degrade`)."""
    quality: Quality = "exact"
    """The quality in which it was made."""

    @property
    def latency_s(self) -> float | None:
        """Seconds from arrival to the result; None without one."""
        return self.end_s - self.arrival_s if self.outcome == FINISHED and self.end_s is not None else None

    @property
    def slo_met(self) -> bool:
        return self.latency_s is not None and self.slo_s is not None and self.latency_s <= self.slo_s


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """One plan as it ran, from the moment it took its workers. Plans that never started have no record."""

    plan_id: int
    model: str
    workers: tuple[WorkerId, ...]
    request_ids: tuple[str, ...]
    start_s: float
    end_s: float
    spans: tuple[StageSpan, ...]
    outcome: PlanOutcome
    used_bytes: tuple[int, ...]
    """Weights, peak activation and handoff buffer of each worker, in rank order."""


@dataclass(slots=True)
class Counts:
    """Numbers of events in a simulation, and the bytes and seconds that they took."""

    plans: int = 0
    """Plans that were sent, started or not."""
    failed_plans: int = 0
    out_of_memory: int = 0
    """Plans that did not fit into memory."""
    frugal_plans: int = 0
    """Plans that fitted only with C in tiles, or with E one request after another."""
    yields: int = 0
    retries: int = 0
    switches: int = 0
    """Changes of the placement."""
    loads: int = 0
    """Replicas that were loaded."""
    load_bytes: int = 0
    load_seconds: float = 0.0
    groups_made: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    spills: int = 0
    """Outputs that found no room in a handoff buffer."""
    checkpoints: int = 0
    resumed_steps: int = 0
    """Denoising steps that were not done again because of checkpoints."""
    ticks: int = 0
    failed_ticks: int = 0
    """Ticks whose policy failed."""
    solve_seconds: float = 0.0
    worker_losses: int = 0
    methods: Counter[str] = field(default_factory=Counter)
    """Number of assignments by the last part of their reasons, after the last comma."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """All that is known of a simulation at its end."""

    requests: Sequence[RequestResult]
    """In order of arrival."""
    counts: Counts
    duration_s: float
    """The time at which the last plan or request ended."""
    num_workers: int
    busy_seconds: dict[Stage, float]
    """GPU-seconds per stage."""
    placements: Sequence[tuple[float, PlacementPlan]]
    """Each placement with the time from which it was in force."""
    plans: Sequence[PlanRecord] = ()
    """Every plan that ran, in the order in which they ended, when plans are kept."""

    @property
    def utilisation(self) -> float:
        """Busy GPU-seconds of stages over all GPU-seconds."""
        available = self.num_workers * self.duration_s
        return sum(self.busy_seconds.values()) / available if available else 0.0

    @property
    def attainment(self) -> float:
        """Share of all requests that met their SLO. Requests without a result did not."""
        return sum(request.slo_met for request in self.requests) / len(self.requests) if self.requests else 0.0

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(request.outcome for request in self.requests)

    @property
    def virtual_replica_shares(self) -> dict[VirtualReplica, float]:
        """Share of the finished requests that each virtual replica served."""
        served = Counter(request.virtual_replica for request in self.requests if request.virtual_replica is not None)
        return {virtual: served[virtual] / served.total() if served else 0.0 for virtual in VirtualReplica}
