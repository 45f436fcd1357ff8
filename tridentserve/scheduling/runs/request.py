"""The scheduler's record of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tridentserve.plans import DispatchPlan, PlanMember, WorkerId
from tridentserve.protocols import PendingRequest
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.runs.legs import Leg
from tridentserve.stages import Stage

if TYPE_CHECKING:
    from tridentserve.scheduling.runs.run import Run


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """The output of a request's latest plan (its condition, state or latents), or a checkpoint of its state."""

    plan_id: int
    """The plan that made it."""
    holder: WorkerId
    """The worker that keeps it."""
    steps_done: int
    """Denoising steps of the request that are in it."""
    is_checkpoint: bool = False
    """It is a copy of the state that was made while the plan ran."""


@dataclass(slots=True)
class Request:
    """A request that has not ended. It is pending while `run` is None. Only its own methods change it."""

    spec: RequestSpec
    arrival_s: float
    slo_s: float
    """Seconds from arrival to the deadline."""
    retries: int = 0
    """Number of times that it was put back into the queue after a failure."""
    steps_done: int = 0
    encoded: bool = False
    """Its condition exists."""
    made_by: KeptOutput | None = None
    """The input of its next plan; None before the first."""
    saved: KeptOutput | None = None
    """The latest checkpoint, which is on another worker than the state itself."""
    run: Run | None = None

    @property
    def deadline_s(self) -> float:
        return self.arrival_s + self.slo_s

    @property
    def steps_left(self) -> int:
        return self.spec.num_inference_steps - self.steps_done

    @property
    def unsaved_steps(self) -> int:
        """Denoising steps that would have to be done again if its state were lost."""
        return self.steps_done - (self.saved.steps_done if self.saved is not None else 0)

    def make_view(self) -> PendingRequest:
        """Its view for the dispatcher while it waits."""
        held_by = self.made_by.holder if self.made_by is not None else None
        return PendingRequest(self.spec, self.arrival_s, self.deadline_s, self.steps_done, self.encoded, held_by)

    def make_member(self, num_steps: int | None, push_to: WorkerId | None) -> PlanMember:
        """Its part in its next plan, which runs `num_steps` steps of D (None: no D). `push_to` leads the one after."""
        return PlanMember(
            request_id=self.spec.request_id,
            steps=None if num_steps is None else (self.steps_done, self.steps_done + num_steps),
            input_id=self.made_by.plan_id if self.made_by is not None else None,
            source=self.made_by.holder if self.made_by is not None else None,
            from_checkpoint=self.made_by is not None and self.made_by.is_checkpoint,
            push_to=push_to,
        )

    def takes_part(self, leg: Leg) -> bool:
        """E is for requests without a condition, C for those that have done all steps (when D is not before it)."""
        if leg.stages == (Stage.ENCODE,):
            return not self.encoded
        return leg.stages != (Stage.DECODE,) or self.steps_left == 0

    def join(self, run: Run) -> None:
        """It is dispatched."""
        self.run = run

    def wait(self) -> None:
        """It is pending (again)."""
        self.run = None

    def advance(self, plan: DispatchPlan, ran: Sequence[Stage], num_steps: int) -> None:
        """A plan of it has ended well after the stages `ran`, which may be none, and `num_steps` steps of D."""
        self.encoded |= Stage.ENCODE in ran
        self.steps_done += num_steps
        if ran:
            self.made_by = KeptOutput(plan.plan_id, plan.leader, self.steps_done)

    def save(self, checkpoint: KeptOutput) -> None:
        """A checkpoint of its state has arrived."""
        self.saved = checkpoint

    def lose_holder(self, worker_id: WorkerId) -> None:
        """A worker is lost, and the checkpoint with it if it was there."""
        if self.saved is not None and self.saved.holder == worker_id:
            self.saved = None

    def count_retry(self, is_retry: bool) -> int:
        """It goes back to the queue. Returns how many retries it has had, with this one if it is one."""
        self.retries += is_retry
        return self.retries

    def isolate(self) -> None:
        """It shares no forward pass from now on."""
        self.spec = replace(self.spec, alone=True)

    def go_back(self, max_retries: int) -> None:
        """It resumes from its latest checkpoint, or else starts again. The last try does not resume from a checkpoint
        that has been tried before, as that may be at fault."""
        saved = self.saved
        if saved is not None and (self.retries < max_retries or self.made_by != saved):
            self.steps_done, self.encoded, self.made_by = saved.steps_done, True, saved
        else:
            self.steps_done, self.encoded, self.made_by, self.saved = 0, False, None, None
        self.run = None
