"""What happens to the scheduler (events) and what it wants done (effects). Plain data, so that a run can be logged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica, StageSpan, WorkerId
from tridentserve.protocols import LoadSource
from tridentserve.requests import RequestSpec


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A validated request has come in."""

    spec: RequestSpec
    kind: Literal["request_arrived"] = "request_arrived"


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The last client that waited for a request has gone, or it was deleted."""

    request_id: str
    kind: Literal["request_cancelled"] = "request_cancelled"


@dataclass(frozen=True, slots=True)
class StageFinished:
    """A plan ended well, on all its workers. One span per stage that ran, in order (all steps together for DIFFUSE).
    `num_steps`: how many steps of D each member did, when a Yield stopped the plan before its end (what would have come
    after D did not run then); None: all of the plan was done."""

    plan_id: int
    spans: tuple[StageSpan, ...]
    num_steps: int | None = None
    kind: Literal["stage_finished"] = "stage_finished"


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The denoising states of a running plan have been copied to `keeper`, after so many of its steps: should a worker
    be lost, the plan's requests go on from there. `spans`: what of the plan had run by then."""

    plan_id: int
    num_steps: int
    keeper: WorkerId
    spans: tuple[StageSpan, ...] = ()
    kind: Literal["state_saved"] = "state_saved"


@dataclass(frozen=True, slots=True)
class PlanStopped:
    """A plan was stopped by an Abort; its workers are free again."""

    plan_id: int
    kind: Literal["plan_stopped"] = "plan_stopped"


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """A plan ended badly. `retry` is False when trying again cannot help (a bad input, say); `code` is the code of a
    class in `tridentserve.errors` then."""

    plan_id: int
    error: str
    retry: bool = True
    code: str = "worker_failed"
    kind: Literal["plan_failed"] = "plan_failed"


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker is ready. `incarnation` grows each time the same device comes back."""

    worker: WorkerSpec
    incarnation: int = 0
    kind: Literal["worker_joined"] = "worker_joined"


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's process has ended; everything it held is gone."""

    worker_id: WorkerId
    error: str
    kind: Literal["worker_lost"] = "worker_lost"


@dataclass(frozen=True, slots=True)
class ReplicaLoaded:
    """A worker has fetched a replica that its placement wants (Adjust-on-Dispatch) and dropped others to make room."""

    worker_id: WorkerId
    loaded: Replica
    evicted: tuple[Replica, ...]
    source: LoadSource
    num_bytes: int
    seconds: float
    kind: Literal["replica_loaded"] = "replica_loaded"


@dataclass(frozen=True, slots=True)
class ModelAdded:
    """A model can be asked for from now on, for the first time or again: its weights are at hand on every node, and
    `placement` holds it beside the others (None: the one in force does).

    `slo_scale`, `expected`, `window_s`: see `SchedulerOptions` and the Replanner; `profile`: its name in the profile
    tables, for who replays a log."""

    model: str
    profile: str
    slo_scale: float
    placement: PlacementPlan | None = None
    expected: tuple[LoadShare, ...] = ()
    window_s: float | None = None
    kind: Literal["model_added"] = "model_added"


@dataclass(frozen=True, slots=True)
class ModelDraining:
    """No new requests of a model are to be taken; those that are there go on."""

    model: str
    kind: Literal["model_draining"] = "model_draining"


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """A model is not to be served any more: what is left of its requests ends, and `placement` is without it."""

    model: str
    placement: PlacementPlan | None = None
    kind: Literal["model_removed"] = "model_removed"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time to dispatch."""

    kind: Literal["tick"] = "tick"


Event = (
    RequestArrived
    | RequestCancelled
    | StageFinished
    | CheckpointSaved
    | PlanStopped
    | PlanFailed
    | WorkerJoined
    | WorkerLost
    | ReplicaLoaded
    | ModelAdded
    | ModelDraining
    | ModelRemoved
    | Tick
)


def may_change_plans(event: Event) -> bool:
    """Whether there may be something new to dispatch after an event: a tick is due."""
    return not isinstance(event, CheckpointSaved)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Send a plan to its workers."""

    plan: DispatchPlan
    reason: str
    kind: Literal["run"] = "run"


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a plan at its next step boundary and drop what it holds: nobody waits for it any more."""

    request_id: str
    plan_id: int
    reason: str
    kind: Literal["abort"] = "abort"


@dataclass(frozen=True, slots=True)
class Yield:
    """Stop a plan at its next step boundary and keep its state where it is. `StageFinished` says how far it came."""

    plan_id: int
    reason: str
    kind: Literal["yield"] = "yield"


@dataclass(frozen=True, slots=True)
class Place:
    """A new placement is in force. Weights move when plans need them (Adjust-on-Dispatch)."""

    plan: PlacementPlan
    reason: str
    kind: Literal["place"] = "place"


@dataclass(frozen=True, slots=True)
class Requeue:
    """A request waits for a dispatch again. `steps_done`: it goes on from the latest copy of its state, which was made
    after so many steps; 0: it begins anew. What workers hold of it beside that copy is of no use."""

    request_id: str
    reason: str
    steps_done: int = 0
    kind: Literal["requeue"] = "requeue"


@dataclass(frozen=True, slots=True)
class Finish:
    """A request's last stage is done: hand out the result, drop what workers still hold of it."""

    request_id: str
    latency_s: float
    slo_s: float
    reason: str
    kind: Literal["finish"] = "finish"


@dataclass(frozen=True, slots=True)
class Reject:
    """A request ends without a result. `code` is the code of a class in `tridentserve.errors`."""

    request_id: str
    code: str
    reason: str
    kind: Literal["reject"] = "reject"


@dataclass(frozen=True, slots=True)
class Drained:
    """The last request of a draining model has ended."""

    model: str
    reason: str
    kind: Literal["drained"] = "drained"


@dataclass(frozen=True, slots=True)
class Unload:
    """Nothing of a removed model runs or waits anywhere: workers drop its weights."""

    model: str
    reason: str
    kind: Literal["unload"] = "unload"


Effect = RunPlan | Abort | Yield | Place | Requeue | Finish | Reject | Drained | Unload
