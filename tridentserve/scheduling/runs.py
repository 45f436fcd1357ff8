"""What the scheduler keeps of each request, and of each assignment while it is carried out (a run)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import overload

from tridentserve.plans import DispatchPlan, PlanMember, WorkerId
from tridentserve.protocols import Assignment, PendingRequest, RunningRequest
from tridentserve.requests import RequestSpec
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class Leg:
    """Consecutive stages of a run on one set of workers: a dispatch plan that is not due yet."""

    stages: tuple[Stage, ...]
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """What a plan has left of a request after `steps_done` steps of D, kept by `holder`: the condition, the state or
    the latents; or a copy of the state that was made while the plan ran."""

    plan_id: int
    holder: WorkerId
    steps_done: int
    is_checkpoint: bool = False


@dataclass(slots=True)
class Request:
    """A request that has not ended. It is pending while `run` is None.

    `made_by` is what its next plan takes, None before the first. `saved` is the latest copy of its state, which is on
    another worker than the state itself."""

    spec: RequestSpec
    arrival_s: float
    slo_s: float
    retries: int = 0
    steps_done: int = 0
    encoded: bool = False
    made_by: KeptOutput | None = None
    saved: KeptOutput | None = None
    run: Run | None = None

    @property
    def deadline_s(self) -> float:
        return self.arrival_s + self.slo_s

    @property
    def steps_left(self) -> int:
        return self.spec.num_inference_steps - self.steps_done

    def pending(self) -> PendingRequest:
        """As the dispatcher sees it while it waits."""
        held_by = self.made_by.holder if self.made_by is not None else None
        return PendingRequest(self.spec, self.arrival_s, self.deadline_s, self.steps_done, self.encoded, held_by)

    @property
    def unsaved_steps(self) -> int:
        """Steps that would have to be done again if its state were lost."""
        return self.steps_done - (self.saved.steps_done if self.saved is not None else 0)

    def start_again(self) -> None:
        """Whatever was made of it is of no use any more."""
        self.steps_done, self.encoded, self.made_by, self.saved, self.run = 0, False, None, None, None

    def go_back_to(self, saved: KeptOutput) -> None:
        """What was made of it since a copy of its state is of no use any more."""
        self.steps_done, self.encoded, self.made_by, self.run = saved.steps_done, True, saved, None

    def member(self, num_steps: int | None, push_to: WorkerId | None) -> PlanMember:
        """Its part in its next plan, which runs `num_steps` steps of D (None: no D). `push_to` leads the one after."""
        return PlanMember(
            request_id=self.spec.request_id,
            steps=None if num_steps is None else (self.steps_done, self.steps_done + num_steps),
            input_id=self.made_by.plan_id if self.made_by is not None else None,
            source=self.made_by.holder if self.made_by is not None else None,
            from_checkpoint=self.made_by is not None and self.made_by.is_checkpoint,
            push_to=push_to,
        )


@dataclass(slots=True)
class Run:
    """An assignment that is being carried out. `requests` are the members that have not left (cancelled).
    `diffuse_end_s`: when D is expected to end; `step_s`: expected seconds per step."""

    run_id: int
    requests: list[Request]
    assignment: Assignment
    num_steps: int
    legs: list[Leg]
    step_s: float
    diffuse_end_s: float
    plan: DispatchPlan | None = None
    yielding: bool = False

    @property
    def spec(self) -> RequestSpec:
        """Of the first member; all have the same model and shape."""
        return self.requests[0].spec

    @property
    def workers(self) -> set[WorkerId]:
        """All that may have been reserved for it or promised to it."""
        return {*self.assignment.encode, *self.assignment.diffuse, *self.assignment.decode}

    def view(self, request: Request, now_s: float) -> RunningRequest:
        """A member as the dispatcher sees it. How far D has come is estimated from its expected end."""
        stages = self.plan.stages if self.plan is not None else ()
        left = min(max((self.diffuse_end_s - now_s) / self.step_s, 0.0), self.num_steps) if self.step_s else 0.0
        stage = stages[0] if stages else Stage.ENCODE
        if Stage.DIFFUSE in stages:
            stage = Stage.DIFFUSE if left > 0 or stages[-1] is Stage.DIFFUSE else Stage.DECODE
        done = self.num_steps - int(left + 0.999) if stage is not Stage.ENCODE else 0
        is_after = stage is Stage.DECODE and Stage.DIFFUSE not in stages
        return RunningRequest(
            spec=request.spec,
            arrival_s=request.arrival_s,
            deadline_s=request.deadline_s,
            stage=stage,
            diffuse=self.assignment.diffuse,
            steps_done=request.steps_done if is_after else request.steps_done + done,
            expected_end_s=max(self.assignment.expected_finish_s, now_s),
            yielding=self.yielding,
            batch=len(self.requests),
        )


def legs_of(assignment: Assignment, needs_encode: bool, finishing: int) -> list[Leg]:
    """Merge consecutive stages that have the same workers ("merging execute", section 5.2).

    `finishing`: how many members reach their last step. C of some members only is a plan of its own.
    """
    legs: list[Leg] = []
    for stage, workers in (
        (Stage.ENCODE, assignment.encode if needs_encode else ()),
        (Stage.DIFFUSE, assignment.diffuse),
        (Stage.DECODE, assignment.decode if finishing else ()),
    ):
        is_for_all = stage is not Stage.DECODE or finishing == len(assignment.request_ids)
        if not workers:
            continue
        if legs and legs[-1].workers == workers and is_for_all:
            legs[-1] = Leg((*legs[-1].stages, stage), workers)
        else:
            legs.append(Leg((stage,), workers))
    return legs


@dataclass(slots=True)
class LazyViews(Sequence[RunningRequest]):
    """The running requests, put together only for a policy that looks at them."""

    make: Callable[[], list[RunningRequest]]
    _views: list[RunningRequest] | None = field(default=None)

    def _all(self) -> list[RunningRequest]:
        if self._views is None:
            self._views = self.make()
        return self._views

    @overload
    def __getitem__(self, index: int) -> RunningRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RunningRequest]: ...
    def __getitem__(self, index: int | slice) -> RunningRequest | Sequence[RunningRequest]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())
