"""Events, which happen to the scheduler, and effects, which it wants carried out: plain data that can be logged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica, StageSpan, WorkerId
from tridentserve.protocols import LoadSource
from tridentserve.requests import Quality, RequestSpec


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
    """A plan ended well, on all its workers."""

    plan_id: int
    spans: tuple[StageSpan, ...]
    """The stages that ran, in order."""
    num_steps: int | None = None
    """Denoising steps that each member did, when a `Yield` stopped the plan before its end; stages after D did not run
    then. None: the whole plan was carried out."""
    loras: tuple[tuple[WorkerId, tuple[str, ...]], ...] = ()
    """The workers whose LoRAs have changed since they told, with those that each holds now, by `LoraFile.key`."""
    kind: Literal["stage_finished"] = "stage_finished"


@dataclass(frozen=True, slots=True)
class PlanComputed:
    """A plan has done all its stages, and its workers are free. Its outputs are being made into files, which takes a
    while; how the plan ended is still to come."""

    plan_id: int
    kind: Literal["plan_computed"] = "plan_computed"


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint of a running plan has arrived: if a worker is lost, the plan's requests resume from there."""

    plan_id: int
    num_steps: int
    """Denoising steps of the plan that are in it."""
    keeper: WorkerId
    """The worker that keeps it."""
    spans: tuple[StageSpan, ...] = ()
    """The stages of the plan that had run by then."""
    kind: Literal["state_saved"] = "state_saved"


@dataclass(frozen=True, slots=True)
class PlanStopped:
    """A plan was stopped by an Abort; its workers are free again."""

    plan_id: int
    kind: Literal["plan_stopped"] = "plan_stopped"


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """A plan ended badly."""

    plan_id: int
    error: str
    retry: bool = True
    """False when trying again cannot help, with a bad input for example."""
    code: str = "worker_failed"
    """Code of a class in `tridentserve.errors`."""
    workers: tuple[WorkerId, ...] = ()
    """The workers that may be at fault; none where a lost worker, a handoff or short memory is."""
    kind: Literal["plan_failed"] = "plan_failed"


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker is ready."""

    worker: WorkerSpec
    incarnation: int = 0
    """Grows each time the same device comes back."""
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
    """Clients can ask for a model from now on, for the first time or again. Its weights are on every node."""

    model: str
    profile: str
    """Its name in the profile tables, which the replay of a log needs."""
    slo_scale: float
    """See `SchedulerOptions.slo_scale`."""
    placement: PlacementPlan | None = None
    """The placement with this model; None: the one in force has it."""
    expected: tuple[LoadShare, ...] = ()
    """See `Replanner.expect`."""
    window_s: float | None = None
    """See `Replanner.expect`."""
    kind: Literal["model_added"] = "model_added"


@dataclass(frozen=True, slots=True)
class ModelDraining:
    """A model takes no new requests; those that have been accepted continue."""

    model: str
    kind: Literal["model_draining"] = "model_draining"


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """A model is not served any more: its unfinished requests end, and `placement` is without it."""

    model: str
    placement: PlacementPlan | None = None
    kind: Literal["model_removed"] = "model_removed"


@dataclass(frozen=True, slots=True)
class WarmUpBegun:
    """The engine gives workers a plan of a warm-up, of which the scheduler decides nothing: a model has been added, and
    they run what they will be asked for. They have something to do until it has ended."""

    plan: DispatchPlan
    expected_s: float
    kind: Literal["warm_up_begun"] = "warm_up_begun"


@dataclass(frozen=True, slots=True)
class WarmUpEnded:
    """A plan of a warm-up has ended, however it did."""

    plan: DispatchPlan
    kind: Literal["warm_up_ended"] = "warm_up_ended"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time to dispatch."""

    kind: Literal["tick"] = "tick"


Event = (
    RequestArrived
    | RequestCancelled
    | StageFinished
    | PlanComputed
    | CheckpointSaved
    | PlanStopped
    | PlanFailed
    | WorkerJoined
    | WorkerLost
    | ReplicaLoaded
    | ModelAdded
    | ModelDraining
    | ModelRemoved
    | WarmUpBegun
    | WarmUpEnded
    | Tick
)


def may_change_plans(event: Event) -> bool:
    """True where an event may let something be dispatched, so that a tick is due."""
    return not isinstance(event, CheckpointSaved)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Send a plan to its workers."""

    plan: DispatchPlan
    reason: str
    kind: Literal["run"] = "run"


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a plan at its next step boundary and drop what it holds: no client waits for it any more."""

    request_id: str
    plan_id: int
    reason: str
    kind: Literal["abort"] = "abort"


@dataclass(frozen=True, slots=True)
class Yield:
    """Stop a plan at its next step boundary and keep its state where it is. `StageFinished` reports the steps done."""

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
    """A request waits for a dispatch again. Workers drop all they hold of it but the checkpoint."""

    request_id: str
    reason: str
    steps_done: int = 0
    """Denoising steps in that checkpoint; 0: the request starts again."""
    kind: Literal["requeue"] = "requeue"


@dataclass(frozen=True, slots=True)
class Finish:
    """A request's last stage is done: hand out the result, drop what workers still hold of it."""

    request_id: str
    latency_s: float
    slo_s: float
    reason: str
    predicted_s: float | None = None
    """Seconds from arrival to the end that were predicted when it arrived; None where nothing was."""
    kind: Literal["finish"] = "finish"


@dataclass(frozen=True, slots=True)
class Reject:
    """A request ends without a result."""

    request_id: str
    code: str
    """Code of a class in `tridentserve.errors`."""
    reason: str
    predicted_s: float | None = None
    """Seconds from arrival to its end that were predicted, where it is refused because of that."""
    kind: Literal["reject"] = "reject"


@dataclass(frozen=True, slots=True)
class SetAside:
    """A worker on which plans fail is given no others for a while, or is given plans again."""

    worker_id: WorkerId
    reason: str
    until_s: float | None
    """The end of that while; None: the worker is given plans again."""
    kind: Literal["set_aside"] = "set_aside"


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


@dataclass(frozen=True, slots=True)
class Degrade:
    """A request that has just arrived is made with less work, as it asks for where it would be late."""

    request_id: str
    num_inference_steps: int
    reason: str
    quality: Quality = "exact"
    kind: Literal["degrade"] = "degrade"

    @classmethod
    def make(cls, spec: RequestSpec, reason: str) -> Degrade:
        """The effect for the request as it is to be made."""
        return cls(spec.request_id, spec.num_inference_steps, reason, spec.quality)

    def apply(self, spec: RequestSpec) -> RequestSpec:
        """The request as it is to be made, of the one that has arrived."""
        return replace(spec, num_inference_steps=self.num_inference_steps, quality=self.quality)


Effect = RunPlan | Abort | Yield | Place | Requeue | Finish | Reject | SetAside | Drained | Unload | Degrade
