"""The scheduler's record of an assignment while it is carried out: a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tridentserve.plans import DispatchPlan, PlanMember, WorkerId
from tridentserve.protocols import Assignment, RunningRequest
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.runs.legs import Leg
from tridentserve.scheduling.runs.request import Request
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class Inheritance:
    """The part that a request has in a plan which has not ended when its next one is sent."""

    plan: DispatchPlan
    steps_done: int
    """Denoising steps of the request that are expected to be done by the end of that plan."""


@dataclass(slots=True)
class Run:
    """An assignment that is being carried out, plan by plan. Only its own methods change it."""

    run_id: int
    requests: list[Request]
    """The members that have neither been cancelled nor ended."""
    assignment: Assignment
    num_steps: int
    """Denoising steps of each member."""
    legs: list[Leg]
    """The plans that are still to come."""
    step_s: float
    """Expected seconds of a denoising step."""
    diffuse_end_s: float
    """The time at which D is expected to end."""
    is_mixed: bool = False
    """Its requests differ in size."""
    plan: DispatchPlan | None = None
    """The plan that its workers have now."""
    yielding: bool = False
    """It has been preempted: it stops at its next step boundary."""
    open_s: float = 0.0
    """The time from which on its plan with D can be taken over: half a step after it was sent."""
    computed: bool = False
    """All its stages are done, and its workers are free; its results are not there yet."""
    followers: list[Run] = field(default_factory=list)
    """The runs whose plans have been sent behind its own, in their order, until that has ended: the one with which its
    members go on, and the one in which others join them."""
    given: tuple[Request, ...] = ()
    """The members that it has given to the last of its followers, which others join."""
    head: Run | None = None
    """The run behind whose plan its own has been sent, until that has ended."""
    predecessor: DispatchPlan | None = None
    """The plan that its own plan takes over, until the head's has ended."""
    inherited: Mapping[str, Inheritance] = field(default_factory=dict)
    """Members that come from plans which have not ended."""
    decode_ahead: DispatchPlan | None = None
    """C of those that end with its plan with D, which has been sent behind that."""

    @property
    def spec(self) -> RequestSpec:
        """The first member's; all have the same model, and the same shape unless the run is mixed."""
        return self.requests[0].spec

    @property
    def workers(self) -> set[WorkerId]:
        """All that may have been reserved for it or promised to it."""
        return {*self.assignment.encode, *self.assignment.diffuse, *self.assignment.decode}

    @property
    def line(self) -> list[DispatchPlan]:
        """Its plan, and those that have been sent behind it, in their order."""
        return [run.plan for run in (self, *self.followers) if run.plan is not None]

    def list_members_of(self, plan: DispatchPlan) -> list[Request]:
        """Its requests that are in a plan."""
        return [request for request in self.requests if request.spec.request_id in plan.request_ids]

    def take_members(self, leg: Leg) -> list[PlanMember]:
        """The members of its next plan, which runs the leg's stages. The leg is no longer to come then."""
        self.legs.pop(0)
        num_steps = self.num_steps if Stage.DIFFUSE in leg.stages else None
        push_to = self.legs[0].workers[0] if self.legs else None
        return [
            self._inherit_member(request, push_to) or request.make_member(num_steps, push_to)
            for request in self.requests
            if request.takes_part(leg)
        ]

    def _inherit_member(self, request: Request, push_to: WorkerId | None) -> PlanMember | None:
        """The part of a request that comes from the plan that is taken over; None for others."""
        name = request.spec.request_id
        if self.predecessor is None or (part := self.inherited.get(name)) is None:
            return None
        steps, before = (part.steps_done, part.steps_done + self.num_steps), part.plan
        return PlanMember(name, steps, before.plan_id, before.leader, push_to=push_to, inherited=True)

    def begin_plan(self, plan: DispatchPlan) -> None:
        self.plan = plan

    def open_from(self, sent_s: float) -> None:
        """Its plan with D has been sent."""
        self.open_s = sent_s + self.step_s / 2

    def end_plan(self, plan: DispatchPlan, ran: Sequence[Stage], num_steps: int) -> None:
        """Its plan has ended well after the stages `ran` and `num_steps` steps of D."""
        for request in self.list_members_of(plan):
            request.advance(plan, ran, num_steps)
        self.plan = None

    def note_computed(self) -> None:
        """The last stage of its last plan is done."""
        self.computed = True

    def expect_diffuse_end(self, end_s: float) -> None:
        self.diffuse_end_s = end_s

    def preempt(self) -> bool:
        """Stop its plan at the next step boundary. False where there is nothing to stop, or nothing to gain: what has
        been done of D would be lost where the stock pipeline is called as a whole."""
        if self.plan is None or self.is_stopping or self.computed or self.plan.stages == (Stage.DECODE,):
            return False
        if self.spec.whole and Stage.DIFFUSE in self.plan.stages:
            return False
        for run in (self, *self.followers):
            run.yielding = True
        if Stage.DIFFUSE not in self.plan.stages:
            self.legs.clear()  # E ends as planned, what follows is decided anew
        return True

    @property
    def is_stopping(self) -> bool:
        """True when it stops at its next step boundary, or has not begun and follows another."""
        return self.yielding or self.head is not None

    def follow(self, head: Run, plan: DispatchPlan) -> None:
        """Its plan is sent behind this plan: that of another run, or of the run that follows it."""
        self.head, self.predecessor = head, plan
        head.followers.append(self)

    def give_all(self) -> None:
        """Its members belong to the last of its followers from now on, whose plan takes over its own. Those in between
        have nothing to do."""
        self.given = tuple(self.requests)
        self.requests.clear()
        for run in (self, *self.followers[:-1]):
            run.yielding = True

    def hand_on(self, request: Request, follower: Run) -> None:
        """A member continues in a follower's plan."""
        self.requests.remove(request)
        follower.requests.append(request)
        request.join(follower)

    def take_back(self, request: Request) -> None:
        """A member that its follower does not continue with."""
        if request.run is not None:
            request.run.leave(request)
        self.given = tuple(other for other in self.given if other is not request)
        self.requests.append(request)
        request.join(self)

    def begin_behind(self, followers: Sequence[Run]) -> None:
        """The plan before has ended, and these follow its own. The last of them has those members that others join."""
        self.head, self.followers = None, list(followers)
        for run in followers:
            run.head = self

    def end_line(self) -> list[Run]:
        """Its plan has ended: none follows it any more. Returns those that did."""
        followers, self.followers, self.given = self.followers, [], ()
        for run in followers:
            run.head = None
        return followers

    def begin_taken_over(self, plan: DispatchPlan) -> None:
        """The plan that its own takes over has ended, and `plan` is its own with the steps that it really does."""
        left = plan.num_steps - self.num_steps
        self.plan, self.num_steps, self.predecessor, self.inherited = plan, plan.num_steps, None, {}
        self.diffuse_end_s += left * self.step_s

    def note_decode_ahead(self, plan: DispatchPlan) -> None:
        """Its next leg, C, has been sent behind its plan."""
        self.decode_ahead = plan

    def forget_decode_ahead(self) -> None:
        """That plan has ended without it."""
        self.decode_ahead = None

    def begin_decode_ahead(self) -> None:
        """Its plan with D has ended, and the one that was sent ahead is its own."""
        self.plan, self.decode_ahead = self.decode_ahead, None
        self.legs.pop(0)

    def leave(self, request: Request) -> None:
        """A member is cancelled, has ended, or waits for another dispatch."""
        self.requests.remove(request)

    def add_decode(self, plan: DispatchPlan) -> None:
        """C is still to come: D was stopped when nothing else was left."""
        self.legs.append(Leg((Stage.DECODE,), self.assignment.decode or plan.workers[:1]))

    def view(self, request: Request, now_s: float) -> RunningRequest:
        """The dispatcher's view of a member. How far D has come is estimated from its expected end."""
        stages = self.plan.stages if self.plan is not None else ()
        left = min(max((self.diffuse_end_s - now_s) / self.step_s, 0.0), self.num_steps) if self.step_s else 0.0
        if self.computed:
            left = 0.0
        stage = stages[0] if stages else Stage.ENCODE
        if Stage.DIFFUSE in stages:
            stage = Stage.DIFFUSE if left > 0 or stages[-1] is Stage.DIFFUSE else Stage.DECODE
        done = self.num_steps - int(left + 0.999) if stage is not Stage.ENCODE else 0
        is_after = stage is Stage.DECODE and Stage.DIFFUSE not in stages
        part = self.inherited.get(request.spec.request_id)
        begun = part.steps_done if part is not None else request.steps_done
        return RunningRequest(
            spec=request.spec,
            arrival_s=request.arrival_s,
            deadline_s=request.deadline_s,
            stage=stage,
            diffuse=self.assignment.diffuse,
            steps_done=request.steps_done if is_after else begun + done,
            expected_end_s=max(self.assignment.expected_finish_s, now_s),
            yielding=self.is_stopping,
            batch=len(self.requests),
        )
