"""Dispatch plans (what runs where) and placement plans (what is held where). arXiv 2510.02838, sections 5 and 6."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import PlainSerializer

from tridentserve.stages import PlacementType, Stage

WorkerId = str

# Plans of warm-ups are numbered from here on: the scheduler's, from 0 on, never come so far.
FIRST_WARM_UP_ID = 1 << 48


@dataclass(frozen=True, slots=True, order=True)
class Replica:
    """One stage of one model, as held by a worker."""

    model: str
    stage: Stage


# Written in order, so that a log of the same decisions is the same, byte for byte: a set has no order of its own.
Replicas = Annotated[frozenset[Replica], PlainSerializer(sorted, return_type=list[Replica])]


@dataclass(frozen=True, slots=True)
class PlanMember:
    """One request's part in a plan."""

    request_id: str
    steps: tuple[int, int] | None = None
    """Half-open range of denoising steps; None without DIFFUSE. The members of a batch may be at different steps, and
    all do the same number."""
    input_id: int | None = None
    """The plan whose outputs are the inputs; None when the plan begins with the request's content."""
    source: WorkerId | None = None
    """The worker that keeps the inputs. They have mostly been pushed to the leader already."""
    from_checkpoint: bool = False
    """The inputs are the checkpoint that plan `input_id` made after step `steps[0]`, not its outputs."""
    push_to: WorkerId | None = None
    """The leader of the request's next plan, to which the outputs go at once."""
    inherited: bool = False
    """Its inputs come from a plan that has not ended when this one is sent (see `DispatchPlan.takes_over`): its `steps`
    are an estimate, and it is left out where those inputs are not what this plan works on."""


@dataclass(frozen=True, slots=True)
class CheckpointSteps:
    """Steps after which a plan makes checkpoints of its denoising states. None is made after its last step."""

    keeper: WorkerId
    """The worker that the checkpoints are sent to."""
    first: int
    """The first one is made after this number of the plan's own steps."""
    every: int
    """Number of steps from one checkpoint to the next."""


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Consecutive stages of one request, or of a batch of equal shape (of any shapes where it is E alone, or where
    steps are packed), on one set of workers ("merging execute"). All workers run D, the leader runs E. A plan may stop
    at a step boundary."""

    plan_id: int
    """The scheduler's sequence number. Every worker executes its plans in this order, so that groups never deadlock.
    Plans of warm-ups, which the scheduler does not know, have numbers of their own."""
    model: str
    stages: tuple[Stage, ...]
    workers: tuple[WorkerId, ...]
    """In rank order. The first is the leader, which reports."""
    members: tuple[PlanMember, ...]
    group: str | None = None
    """Name of the process group of exactly these workers; None at degree 1."""
    decode_degree: int = 1
    """C runs on this number of workers, the leader first."""
    saves: CheckpointSteps | None = None
    """Checkpoints that the plan makes during D, against the loss of a worker; None: it makes none."""
    takes_over: int | None = None
    """A plan of the same workers behind which this one is sent before that has ended, and whose requests it continues
    with. Where others join a batch the plan before gives way at its next step boundary, which nobody knows: the steps
    of the members are an estimate (`correct_steps`). Of the members that are `inherited`, D continues with those that
    have steps left then, and C with those that have none; the others are not part of this plan."""

    @property
    def is_warm_up(self) -> bool:
        """True where nobody wants the result: the plan only has its workers do for the first time what they will be
        asked for."""
        return self.plan_id >= FIRST_WARM_UP_ID

    @property
    def leader(self) -> WorkerId:
        return self.workers[0]

    @property
    def degree(self) -> int:
        return len(self.workers)

    def workers_of(self, stage: Stage) -> tuple[WorkerId, ...]:
        """The workers that run a stage of the plan, in rank order."""
        match stage:
            case Stage.ENCODE:
                return self.workers[:1]
            case Stage.DIFFUSE:
                return self.workers
            case Stage.DECODE:
                return self.workers[: self.decode_degree]

    @property
    def groups(self) -> dict[int, str]:
        """The names of the process groups that the plan uses, by size. Each has the first workers of the plan."""
        if self.group is None:
            return {}
        groups = {self.degree: self.group}
        if Stage.DECODE in self.stages and 1 < self.decode_degree < self.degree:
            groups[self.decode_degree] = f"{self.group}/{self.decode_degree}"
        return groups

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(member.request_id for member in self.members)

    @property
    def inherited(self) -> tuple[PlanMember, ...]:
        """The members that come from the plan that this one takes over, or from the one before that."""
        return tuple(member for member in self.members if member.inherited)

    def correct_steps(self, begun: Mapping[str, int], totals: Mapping[str, int]) -> DispatchPlan:
        """The same plan where its members begin after the steps `begun`, by request id; those that are not named are
        left out. `totals` are all the steps of each. They do as many together as the one with the fewest left."""
        num_steps = min(totals[name] - done for name, done in begun.items())
        members = tuple(
            replace(member, steps=(begun[member.request_id], begun[member.request_id] + num_steps))
            for member in self.members
            if member.request_id in begun
        )
        return replace(self, members=members)

    @property
    def num_steps(self) -> int:
        """Denoising steps that each member does; 0 without DIFFUSE."""
        steps = self.members[0].steps
        return steps[1] - steps[0] if steps else 0

    def is_saved_after(self, steps_done: int) -> bool:
        """True when a checkpoint is due after `steps_done` of the plan's steps."""
        saves = self.saves
        if saves is None or not saves.first <= steps_done < self.num_steps:
            return False
        return (steps_done - saves.first) % saves.every == 0


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One stage of a plan as it ran."""

    stage: Stage
    start_s: float
    """The time at which it began: on the scheduler's clock inside the scheduler and in its log, on the Unix clock in
    what workers report and clients see."""
    end_s: float
    """The time at which it ended, on the same clock. All denoising steps of a plan are one span."""
    workers: tuple[WorkerId, ...] = ()
    """The workers that ran it, in rank order. Decision logs of version 0.1 do not name them."""
    steps: int | None = None
    """Denoising steps that each request did; None outside DIFFUSE, and in decision logs of version 0.1."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def gpu_seconds(self) -> float:
        return len(self.workers) * self.seconds

    def shift(self, by_s: float) -> StageSpan:
        """The same span on a clock that is `by_s` ahead."""
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The replicas that each worker holds."""

    replicas: Mapping[WorkerId, Replicas]
    reason: str = ""
    """One sentence that says why it is as it is."""
    epoch: int = field(default=0)
    """Grows with each placement of a service."""

    def type_of(self, worker_id: WorkerId, model: str) -> PlacementType | None:
        """The placement type of a worker with respect to one model; None when it holds nothing of it."""
        held = self.replicas.get(worker_id, frozenset())
        return PlacementType.of(replica.stage for replica in held if replica.model == model)

    def describe(self, worker_id: WorkerId) -> str:
        """A short name such as `tiny-sd3:EDC`, for logs and the Ray dashboard."""
        models = sorted({replica.model for replica in self.replicas.get(worker_id, frozenset())})
        return "+".join(f"{model}:{self.type_of(worker_id, model)}" for model in models) or "empty"
