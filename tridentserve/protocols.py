"""What the core needs of its sibling rooms, as protocols: planners and stage times are handed in, never imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan, Replica, StageSpan, WorkerId
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage

# Where a worker fetches a replica from: a worker of its node, the node's host copy, or the checkpoint.
LoadSource = Literal["peer", "host", "disk"]


class StageTimes(Protocol):
    """Expected times and memory of the stages. Unknown models and sizes raise `ProfileError`."""

    def seconds(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> float:
        """Seconds per denoising step for DIFFUSE, per call for ENCODE and DECODE."""

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        """Peak activation bytes on one worker, weights not counted."""

    def unit(self, model: str, stage: Stage) -> int:
        """How many workers of a node hold the weights of one stage together, a power of two; 1: each holds them all.
        They run it together or not at all (TridentServe, arXiv 2510.02838, appendix E.2)."""

    def weights_bytes(self, model: str, stage: Stage) -> int:
        """Bytes of the weights of one stage that a worker holds."""

    def output_bytes(self, model: str, stage: Stage, shape: Shape, batch: int = 1) -> int:
        """Bytes that a stage hands to the next one (the condition, the latents) or to the client."""

    def transfer_seconds(self, model: str, stage: Stage, shape: Shape, batch: int = 1, same_node: bool = True) -> float:
        """Seconds to move the outputs of a stage to another worker."""

    def load_seconds(self, model: str, stage: Stage, source: LoadSource = "host") -> float:
        """Seconds to make the weights of a stage resident on a worker."""

    def degrees(self, model: str, stage: Stage) -> tuple[int, ...]:
        """The degrees that were profiled, ascending."""

    def optimal_degree(self, model: str, stage: Stage, shape: Shape) -> int:
        """The highest degree whose efficiency T(1) / (k T(k)) is above 0.8."""

    def optimal_batch(self, model: str, stage: Stage, shape: Shape, degree: int = 1) -> int:
        """The largest profiled batch whose latency is under 1.2 times that of one output."""

    def observe(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int, seconds: float) -> None:
        """Learn from one finished stage (seconds per step for DIFFUSE)."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that waits for a dispatch. `steps_done` is above 0 when its D was stopped before; `encoded` when its
    condition exists (kept by worker `held_by` with the state, if any)."""

    spec: RequestSpec
    arrival_s: float
    deadline_s: float
    steps_done: int = 0
    encoded: bool = False
    held_by: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that has been dispatched. `stage` is the one that its current plan is in by now, `steps_done` what is
    expected to be done of D; `yielding` when it was told to stop at its next step boundary. `expected_end_s` is when
    its assignment is expected to end (the request, or its segment of D). `batch` is the size of its batch."""

    spec: RequestSpec
    arrival_s: float
    deadline_s: float
    stage: Stage
    diffuse: tuple[WorkerId, ...]
    steps_done: int
    expected_end_s: float
    yielding: bool = False
    batch: int = 1


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the dispatcher sees it. `idle`: nothing runs, waits or is reserved there.
    `free_at_s`: when all it has been given is expected to end (now or earlier when idle).
    `resident`: what is in its memory by now; `replicas`, its placement, may be ahead of that (Adjust-on-Dispatch).
    None: the same. `place`: see `WorkerSpec`."""

    worker_id: WorkerId
    node_id: str
    memory_bytes: int
    replicas: frozenset[Replica]
    idle: bool
    free_at_s: float
    resident: frozenset[Replica] | None = None
    place: int = 0


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All that a policy may decide from, at one moment."""

    now_s: float
    pending: Sequence[PendingRequest]
    running: Sequence[RunningRequest]
    workers: Sequence[WorkerView]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where the stages of a request, or of a batch of requests of one model and shape, go.

    `diffuse` is in rank order, inside one node. `encode` is empty when all members have their condition. `decode` is
    empty when D stops before its last step. Where the primary holds E or C, `encode` or `decode` is `diffuse` itself
    (merged with D into one plan) or its leader alone; elsewhere they are auxiliaries.
    `num_steps`: D runs so many steps of each member and then waits for a new assignment; None: as many as the member
    with the fewest left has (all, for a single request).
    """

    request_ids: tuple[str, ...]
    primary: PlacementType
    encode: tuple[WorkerId, ...]
    diffuse: tuple[WorkerId, ...]
    decode: tuple[WorkerId, ...]
    expected_finish_s: float
    reason: str
    num_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Preemption:
    """Stop a running request (and its batch) at its next step boundary; it is pending again then."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Give a pending request up: it ends without a result."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decisions:
    """What a policy wants done now. Everything that is not named goes on or waits."""

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
    """How many requests the plan had."""
    span: StageSpan
    """When the stage ran, on the scheduler's clock, and on which workers."""


class Replanner(Protocol):
    """Watches the load and proposes another placement when the current one does not fit it any more. Pure."""

    def arrived(self, spec: RequestSpec, now_s: float) -> None:
        """A request was accepted."""

    def stage_finished(self, report: StageReport) -> None:
        """A stage has run, at `report.span.end_s`."""

    def expect(self, model: str, load: Sequence[LoadShare], window_s: float | None) -> None:
        """A model is served from now on (again, perhaps): this load of it is expected, and stays servable. `window_s`:
        over which its requests are counted; None: as for others."""

    def forget(self, model: str) -> None:
        """A model is not served any more."""

    def propose(self, workers: Sequence[WorkerSpec], placement: PlacementPlan, now_s: float) -> PlacementPlan | None:
        """A better plan for the live workers, or None. Called at every tick, so it is cheap while nothing is due."""
