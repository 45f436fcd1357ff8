"""Plans that are sent behind others before these have ended: when requests join a batch, and when some leave it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from tridentserve.errors import ProfileError
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.protocols import Assignment
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.estimation.expected_times import ExpectedTimes
from tridentserve.scheduling.runs.auxiliary_queues import can_run_as_planned
from tridentserve.scheduling.runs.ledger import Ledger
from tridentserve.scheduling.runs.plan_sender import PlanSender
from tridentserve.scheduling.runs.run import Inheritance, Run
from tridentserve.scheduling.runs.takeovers import Takeovers
from tridentserve.scheduling.workers.worker_pool import WorkerPool
from tridentserve.stages import Stage


class PlansAhead:
    """Sends such plans, and takes in how the plans end that are in line with them."""

    def __init__(
        self, ledger: Ledger, takeovers: Takeovers, pool: WorkerPool, times: ExpectedTimes, sender: PlanSender
    ) -> None:
        self._ledger = ledger
        self._takeovers = takeovers
        self._pool = pool
        self._times = times
        self._sender = sender

    def take_over(self, assignment: Assignment, now_s: float) -> list[ev.Effect]:
        """Send a plan of a running batch and of those that join it behind the plan that it takes over."""
        requests = [self._ledger.requests[request_id] for request_id in assignment.request_ids]
        before = self._takeovers.find_run(assignment, requests, now_s)
        if before is None or before.plan is None:
            return []
        # Those that go on when others leave come through the plan that has been sent for that.
        line = before.line
        inherited = {
            name: Inheritance(next(plan for plan in reversed(line) if name in plan.request_ids), view.steps_done + 1)
            for request in before.requests
            if (name := request.spec.request_id) and (view := before.view(request, now_s))
        }
        totals = {request.spec.request_id: request.spec.num_inference_steps for request in before.requests}
        if any(totals[name] <= part.steps_done for name, part in inherited.items()):
            return []
        try:
            run, promises = self._sender.build_run(assignment, requests, now_s, inherited)
        except ProfileError:
            return []
        leg = run.legs[0]
        if Stage.DIFFUSE not in leg.stages or leg.workers != before.plan.workers:
            return []
        run.follow(before, line[-1])
        self._takeovers.begin(before, run)
        self._sender.reserve(run, promises)
        effects = self._sender.send_leg([run], leg, now_s, assignment.reason)
        run.expect_diffuse_end(run.diffuse_end_s + before.step_s)
        return [*_stop(line, assignment.reason), *effects]

    def send_rest(self, run: Run, now_s: float) -> list[ev.Effect]:
        """Where some members of a run end with its plan and others do not, send what comes next behind it: C of those
        that end where it runs on the same workers, and D of the others."""
        plan = run.plan
        if plan is None or not run.assignment.goes_on or run.is_stopping or run.spec.whole:
            return []
        done = {member.request_id: member.steps[1] for member in plan.members if member.steps is not None}
        left = [each for each in run.requests if each.spec.num_inference_steps > done[each.spec.request_id]]
        if not left or len(left) == len(run.requests):
            return []
        names = tuple(request.spec.request_id for request in left)
        assignment = replace(run.assignment, request_ids=names, encode=(), takes_over=False)
        inherited = {name: Inheritance(plan, done[name]) for name in names}
        try:
            rest, promises = self._sender.build_run(assignment, left, now_s, inherited, is_exact=True)
        except ProfileError:
            return []
        effects = self._send_decode(run, plan, names, now_s)
        rest.follow(run, plan)
        self._ledger.resume_run(rest)
        self._sender.reserve(rest, promises)
        effects += self._sender.send_leg([rest], rest.legs[0], now_s, f"goes on when others of plan {plan.plan_id} end")
        rest.requests.clear()
        return effects

    def _send_decode(self, run: Run, plan: DispatchPlan, going_on: Collection[str], now_s: float) -> list[ev.Effect]:
        """C of the members of a plan that end with it, but for those that go on, where it runs on the same workers."""
        leg = next(iter(run.legs), None)
        if leg is None or leg.stages != (Stage.DECODE,) or leg.workers[0] != plan.leader:
            return []
        if not can_run_as_planned(self._pool, plan.model, leg):
            return []
        ending = [each for each in run.requests if each.spec.request_id not in going_on]
        names = [each.spec.request_id for each in ending]
        members = [PlanMember(name, None, plan.plan_id, plan.leader, inherited=True) for name in names]
        decode = self._sender.make_plan(plan.model, leg, members, plan)
        run.note_decode_ahead(decode)
        self._ledger.send_ahead(decode, run)
        self._pool.release(run.workers, run.run_id)
        self._pool.start(decode, self._times.decode_s([each.spec for each in ending], len(leg.workers)), now_s)
        return [ev.RunPlan(decode, f"sent ahead of the end of plan {plan.plan_id}")]

    def stop(self, run: Run, reason: str) -> list[ev.Effect]:
        """Have the plan of a run, and those behind it, stop at the next step boundary."""
        return _stop(run.line, reason)

    def end_plan(self, plan_id: int, now_s: float, take_in: Callable[[], list[ev.Effect]]) -> list[ev.Effect]:
        """Take in the end of a plan, which others may follow, or which may follow another."""
        effects = self._takeovers.leave_line(plan_id)
        run, ended = self._ledger.find_lone_run(plan_id), self._takeovers.recall(plan_id)
        effects += take_in()
        if run is not None and not run.requests:  # a plan that was to let others through, or that nobody waits for
            self._ledger.end_run(run)
        begun, dropped = self._takeovers.close(ended)
        effects += dropped
        return effects if begun is None else [*effects, *self._begin(begun, now_s)]

    def _begin(self, run: Run, now_s: float) -> list[ev.Effect]:
        """The plan of a run begins, behind C of those that have ended where that is on the same workers."""
        plan = run.plan
        if plan is not None and plan.stages[0] is Stage.DIFFUSE:
            begins_s = self._pool.find_start_s(plan, now_s)
            run.expect_diffuse_end(begins_s + run.num_steps * run.step_s)
            run.open_from(begins_s)
        return self.send_rest(run, now_s)


def _stop(line: Sequence[DispatchPlan], reason: str) -> list[ev.Effect]:
    """Stop a plan, and those that follow it. The last is told first: else it could begin when the one before has
    stopped, without the members that have left that in the meantime."""
    return [ev.Yield(plan.plan_id, reason) for plan in reversed(line)]
