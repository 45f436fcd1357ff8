"""What comes of a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tridentserve.plans import PlacementPlan, StageSpan, WorkerId
from tridentserve.requests import RequestSpec
from tridentserve.stages import Stage, VirtualReplica

PlanOutcome = Literal["finished", "yielded", "stopped", "failed", "unfinished"]

FINISHED = "finished"
# The simulation ended before the request did.
UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class RequestResult:
    """How one request ended. `outcome`: "finished", the code of its error, or "unfinished". `end_s` is None for the
    last. `slo_s` is the request's own until it finishes. `virtual_replica`: by which stages shared workers with its D;
    None unless it finished. `error`: what went wrong, if anything. Since its last retry: `start_s`, when its first
    stage began (None when none has ended), and `timeline`, its stages as they ran, when plans are kept."""

    spec: RequestSpec
    arrival_s: float
    end_s: float | None
    slo_s: float | None
    outcome: str
    retries: int
    virtual_replica: VirtualReplica | None
    error: str | None = None
    start_s: float | None = None
    timeline: tuple[StageSpan, ...] = ()

    @property
    def latency_s(self) -> float | None:
        """Seconds from arrival to the result; None without one."""
        return self.end_s - self.arrival_s if self.outcome == FINISHED and self.end_s is not None else None

    @property
    def slo_met(self) -> bool:
        return self.latency_s is not None and self.slo_s is not None and self.latency_s <= self.slo_s


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """One plan as it ran, from the moment it took its workers. `used_bytes`: per worker, in rank order, weights, peak
    activation and handoff buffer. Plans that never started have no record."""

    plan_id: int
    model: str
    workers: tuple[WorkerId, ...]
    request_ids: tuple[str, ...]
    start_s: float
    end_s: float
    spans: tuple[StageSpan, ...]
    outcome: PlanOutcome
    used_bytes: tuple[int, ...]


@dataclass(slots=True)
class Counts:
    """What happened how often, and how much was moved.

    `plans`: started or not; `out_of_memory`: plans that did not fit; `frugal_plans`: those that fitted with C in tiles,
    or E one request after another; `switches`: changes of the placement; `loads`:
    replicas that were fetched; `spills`: outputs that found no room in a handoff buffer; `methods`: what the reasons of
    assignments end with, after the last comma; `checkpoints`: copies made of the states of a running plan;
    `resumed_steps`: those that need not be done again because of them; `failed_ticks`: ticks whose policy failed."""

    plans: int = 0
    failed_plans: int = 0
    out_of_memory: int = 0
    frugal_plans: int = 0
    yields: int = 0
    retries: int = 0
    switches: int = 0
    loads: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    groups_made: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    spills: int = 0
    checkpoints: int = 0
    resumed_steps: int = 0
    ticks: int = 0
    failed_ticks: int = 0
    solve_seconds: float = 0.0
    worker_losses: int = 0
    methods: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """`requests` in order of arrival; `busy_seconds`: GPU-seconds per stage; `placements`: since when each placement
    was in force; `plans`: every plan that ran, by its end, when they are kept; `duration_s`: when the last plan or
    request ended."""

    requests: Sequence[RequestResult]
    counts: Counts
    duration_s: float
    num_workers: int
    busy_seconds: dict[Stage, float]
    placements: Sequence[tuple[float, PlacementPlan]]
    plans: Sequence[PlanRecord] = ()

    @property
    def utilisation(self) -> float:
        """Busy GPU-seconds of stages over all GPU-seconds."""
        available = self.num_workers * self.duration_s
        return sum(self.busy_seconds.values()) / available if available else 0.0

    @property
    def attainment(self) -> float:
        """Share of all requests that met their SLO. Those that got no result did not."""
        return sum(request.slo_met for request in self.requests) / len(self.requests) if self.requests else 0.0

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(request.outcome for request in self.requests)

    @property
    def virtual_replica_shares(self) -> dict[VirtualReplica, float]:
        """Of the finished requests, the share that each virtual replica served."""
        served = Counter(request.virtual_replica for request in self.requests if request.virtual_replica is not None)
        return {virtual: served[virtual] / served.total() if served else 0.0 for virtual in VirtualReplica}
