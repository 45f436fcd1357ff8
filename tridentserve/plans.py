"""Dispatch plans (what runs where) and placement plans (what is held where). arXiv 2510.02838, sections 5 and 6."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import PlainSerializer

from tridentserve.stages import PlacementType, Stage

WorkerId = str


@dataclass(frozen=True, slots=True, order=True)
class Replica:
    """One stage of one model, as held by a worker."""

    model: str
    stage: Stage


# Written in order, so that a log of the same decisions is the same, byte for byte: a set has no order of its own.
Replicas = Annotated[frozenset[Replica], PlainSerializer(sorted, return_type=list[Replica])]


@dataclass(frozen=True, slots=True)
class PlanMember:
    """One request's part in a plan.

    `steps` is the half-open range of denoising steps when DIFFUSE is among the plan's stages; the members of a batch
    may be at different steps, and all do equally many. The inputs are the outputs of plan `input_id`, kept by worker
    `source` and mostly pushed already; both are None when the plan begins with the request's content.
    """

    request_id: str
    steps: tuple[int, int] | None = None
    input_id: int | None = None
    source: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Consecutive stages of one request, or of a batch of equal shape, on one set of workers ("merging execute").

    `plan_id` is the scheduler's sequence number: every worker executes its plans in this order, so that groups never
    deadlock. `workers` is in rank order; the first is the leader and reports. A plan may stop at a step boundary.
    `group` names the process group of exactly these workers (None at degree 1). `push_to` is the leader of the
    successor plan, where the outputs go at once.
    """

    plan_id: int
    model: str
    stages: tuple[Stage, ...]
    workers: tuple[WorkerId, ...]
    members: tuple[PlanMember, ...]
    group: str | None = None
    push_to: WorkerId | None = None

    @property
    def leader(self) -> WorkerId:
        return self.workers[0]

    @property
    def degree(self) -> int:
        return len(self.workers)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(member.request_id for member in self.members)

    @property
    def num_steps(self) -> int:
        """Denoising steps that each member does; 0 without DIFFUSE."""
        steps = self.members[0].steps
        return steps[1] - steps[0] if steps else 0


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Which replicas each worker holds. `reason` says in a sentence where the shares come from."""

    replicas: Mapping[WorkerId, Replicas]
    reason: str = ""
    epoch: int = field(default=0)

    def type_of(self, worker_id: WorkerId, model: str) -> PlacementType | None:
        """The placement type of a worker with respect to one model; None when it holds nothing of it."""
        held = self.replicas.get(worker_id, frozenset())
        return PlacementType.of(replica.stage for replica in held if replica.model == model)

    def describe(self, worker_id: WorkerId) -> str:
        """A short name such as `tiny-sd3:EDC`, for logs and the Ray dashboard."""
        models = sorted({replica.model for replica in self.replicas.get(worker_id, frozenset())})
        return "+".join(f"{model}:{self.type_of(worker_id, model)}" for model in models) or "empty"
