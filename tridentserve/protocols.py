"""Protocols of the planners and stage times that are handed to the scheduler, and the types of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan, Replica, StageSpan, WorkerId
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage

# The source from which a worker fetches a replica: a worker of its node, the node's host copy, or the model folder.
LoadSource = Literal["peer", "host", "disk"]


class StageMemory(Protocol):
    """Expected memory of the stages. Unknown models and sizes raise `ProfileError`."""

    def degrees(self, model: str, stage: Stage) -> tuple[int, ...]:
        """The degrees that were profiled, ascending."""

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        """Peak activation bytes on one worker, weights not counted."""


class StageTimes(StageMemory, Protocol):
    """Expected times and memory of the stages. Unknown models and sizes raise `ProfileError`."""

    def seconds(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> float:
        """Seconds per denoising step for DIFFUSE, per call for ENCODE and DECODE."""

    def unit(self, model: str, stage: Stage) -> int:
        """Number of workers of a node that hold the weights of one stage together, a power of two; 1: each holds them
        all. They run the stage together or not at all (TridentServe, arXiv 2510.02838, appendix E.2)."""

    def weights_bytes(self, model: str, stage: Stage) -> int:
        """Bytes of the weights of one stage that a worker holds."""

    def output_bytes(self, model: str, stage: Stage, shape: Shape, batch: int = 1) -> int:
        """Bytes that a stage hands to the next one (the condition, the latents) or to the client."""

    def transfer_seconds(self, model: str, stage: Stage, shape: Shape, batch: int = 1, same_node: bool = True) -> float:
        """Seconds to move the outputs of a stage to another worker."""

    def load_seconds(self, model: str, stage: Stage, source: LoadSource = "host") -> float:
        """Seconds to make the weights of a stage resident on a worker."""

    def optimal_degree(self, model: str, stage: Stage, shape: Shape) -> int:
        """The highest degree whose efficiency T(1) / (k T(k)) is above 0.8."""

    def optimal_batch(self, model: str, stage: Stage, shape: Shape, degree: int = 1) -> int:
        """The largest profiled batch whose latency is under 1.2 times that of one output."""

    def packed_seconds(self, model: str, shapes: Sequence[Shape]) -> float:
        """Seconds of a denoising step at degree 1 in which outputs of these shapes are one packed sequence."""

    def observe(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int, seconds: float) -> None:
        """Learn from one finished stage (seconds per step for DIFFUSE)."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that waits for a dispatch."""

    spec: RequestSpec
    arrival_s: float
    deadline_s: float
    steps_done: int = 0
    """Denoising steps that are done; above 0 when its D was stopped before, or resumes from a checkpoint."""
    encoded: bool = False
    """Its condition exists."""
    held_by: WorkerId | None = None
    """The worker that keeps its condition and its state, if there are any."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that has been dispatched."""

    spec: RequestSpec
    arrival_s: float
    deadline_s: float
    stage: Stage
    """The stage that its current plan is expected to be in."""
    diffuse: tuple[WorkerId, ...]
    """The workers of D, in rank order."""
    steps_done: int
    """Denoising steps that are expected to be done."""
    expected_end_s: float
    """The time at which its assignment is expected to end: the request, or its segment of D."""
    yielding: bool = False
    """It has been preempted, and stops at its next step boundary."""
    batch: int = 1
    """Number of requests in its batch."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The dispatcher's view of a worker."""

    worker_id: WorkerId
    node_id: str
    memory_bytes: int
    replicas: frozenset[Replica]
    """Its placement."""
    idle: bool
    """Nothing runs, waits or is reserved there."""
    free_at_s: float
    """The time at which all plans that it has been given are expected to end; now or earlier when it is idle."""
    resident: frozenset[Replica] | None = None
    """The replicas in its memory, which follow its placement as plans need them (Adjust-on-Dispatch). None: the same
    as `replicas`."""
    place: int = 0
    """See `WorkerSpec.place`."""
    promised_s: float = 0.0
    """The seconds of `free_at_s` that are for E's and C's which have not been sent there: where the most urgent C goes
    first, it does not wait for them."""
    loras: frozenset[str] = frozenset()
    """The LoRAs that it holds, by `LoraFile.key`."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All that a policy may decide from at one tick."""

    now_s: float
    pending: Sequence[PendingRequest]
    running: Sequence[RunningRequest]
    workers: Sequence[WorkerView]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The workers of the stages of a request, or of a batch of requests of one model and shape.

    Where the primary holds E or C, `encode` or `decode` is `diffuse` itself (merged with D into one plan) or its leader
    alone; elsewhere they are auxiliaries."""

    request_ids: tuple[str, ...]
    primary: PlacementType
    """Placement type of the workers of D."""
    encode: tuple[WorkerId, ...]
    """Empty when all members have their condition."""
    diffuse: tuple[WorkerId, ...]
    """In rank order, inside one node."""
    decode: tuple[WorkerId, ...]
    """Empty when D stops before its last step."""
    expected_finish_s: float
    reason: str
    """Why the policy decided so, in a sentence for the decision log."""
    num_steps: int | None = None
    """D runs this number of steps of each member, which then wait for a new assignment. None: the number that the
    member with the fewest left has, which is all steps of a single request."""
    apart: frozenset[Stage] = frozenset()
    """E and C that are plans of their own also where they run on the workers of D, since the memory of these has no
    room for all stages at once. Weights that are in the way leave it and come back."""
    takes_over: bool = False
    """The requests are all those of one running batch, and others that join it: they continue together on its workers,
    in its order, from its next step boundary on, with no round trip in between. Ignored where the batch has no such
    boundary any more, or is being stopped or taken over already; those that were to join it wait."""
    goes_on: bool = False
    """Where some of a batch have done all their steps, the others go on together on its workers, with no round trip in
    between, as if the policy had decided so; others may join them, and they may be stopped. Otherwise they wait for a
    new assignment."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """Stop a running request (and its batch) at its next step boundary; it is pending again then."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Give up a pending request: it ends without a result."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decisions:
    """A policy's answer at one tick. Requests that it does not name continue or wait."""

    assignments: Sequence[Assignment] = field(default_factory=tuple)
    preemptions: Sequence[Preemption] = field(default_factory=tuple)
    refusals: Sequence[Refusal] = field(default_factory=tuple)


class Dispatcher(Protocol):
    """Chooses, each tick, which pending requests run now, where and at which degree. Pure: time is an argument."""

    def decide(self, view: ClusterView) -> Decisions:
        """Each worker of `diffuse` must be idle and is used at most once; auxiliaries queue."""

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        """None when the placement could serve the request on an idle cluster, else a sentence that says why not."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage that has finished, as a replanner counts it."""

    model: str
    kind: PlacementType
    """Placement type of the worker that led the plan."""
    shape: Shape
    """Size of the largest request."""
    requests: int
    """Number of requests that the plan had."""
    span: StageSpan
    """The time in which the stage ran, on the scheduler's clock, and its workers."""


class Replanner(Protocol):
    """Watches the load and proposes another placement when the current one no longer fits it. Pure."""

    def arrived(self, spec: RequestSpec, now_s: float) -> None:
        """A request was accepted."""

    def stage_finished(self, report: StageReport) -> None:
        """A stage has run, at `report.span.end_s`."""

    def expect(self, model: str, load: Sequence[LoadShare], window_s: float | None) -> None:
        """A model is served from now on, for the first time or again. The placement must be able to serve `load`. Its
        requests are counted over `window_s` seconds; None: over the same time as those of other models."""

    def forget(self, model: str) -> None:
        """A model is no longer served."""

    def propose(self, workers: Sequence[WorkerSpec], placement: PlacementPlan, now_s: float) -> PlacementPlan | None:
        """A better plan for the live workers, or None. Called at every tick, so it is cheap while nothing is due."""
