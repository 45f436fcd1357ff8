"""Carries out assignments: sends the plans of a run one after another, and takes in how each of them ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from tridentserve.errors import ProfileError
from tridentserve.plans import DispatchPlan, PlanMember, Replica
from tridentserve.protocols import Assignment, Preemption
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.auxiliary_queues import DecodeQueue, EncodeQueue, OtherPlaces, can_run_as_planned
from tridentserve.scheduling.checkpoint_schedule import CheckpointSchedule
from tridentserve.scheduling.estimation.expected_times import ExpectedTimes
from tridentserve.scheduling.ledger import Ledger
from tridentserve.scheduling.runs import Inheritance, Leg, Request, Run, merge_legs
from tridentserve.scheduling.takeovers import Takeovers
from tridentserve.scheduling.workers.worker_pool import WorkerPool
from tridentserve.stages import Stage


class AssignmentRunner:
    """An assignment becomes a run, and the legs of a run become plans. A lone E or C waits in its queue until a worker
    can take it."""

    def __init__(
        self,
        ledger: Ledger,
        pool: WorkerPool,
        times: ExpectedTimes,
        places: OtherPlaces,
        encodes: EncodeQueue,
        decodes: DecodeQueue,
        checkpoints: CheckpointSchedule,
    ) -> None:
        self._ledger = ledger
        self._pool = pool
        self._times = times
        self._places = places
        self._encodes = encodes
        self._decodes = decodes
        self._checkpoints = checkpoints
        self._takeovers = Takeovers(ledger)

    def start(self, assignment: Assignment, now_s: float) -> list[ev.Effect]:
        """Begin a run of requests that wait, or that join a running batch."""
        if assignment.takes_over:
            return self._take_over(assignment, now_s)
        requests = [self._ledger.requests[request_id] for request_id in assignment.request_ids]
        try:
            run, promises = self._build_run(assignment, requests, now_s)
        except ProfileError as error:  # nothing has changed yet
            return [self._ledger.reject(request, "invalid_request", str(error)) for request in requests]
        self._ledger.begin_run(run)
        self._pool.reserve(assignment.diffuse, run.run_id, run.diffuse_end_s)
        for leg, seconds in promises:
            self._pool.promise(leg.workers, run.run_id, seconds)
        return self._run_next_leg(run, now_s, assignment.reason)

    def _take_over(self, assignment: Assignment, now_s: float) -> list[ev.Effect]:
        """Send a plan of a running batch and of those that join it behind the plan that it takes over."""
        requests = [self._ledger.requests[request_id] for request_id in assignment.request_ids]
        before = self._takeovers.find_run(assignment, requests, now_s)
        if before is None or before.plan is None:
            return []
        # Those that go on when others leave come through the plan that has been sent for that.
        line = [before.plan, *(each.plan for each in before.followers if each.plan is not None)]
        inherited = {
            name: Inheritance(next(plan for plan in reversed(line) if name in plan.request_ids), view.steps_done + 1)
            for request in before.requests
            if (name := request.spec.request_id) and (view := before.view(request, now_s))
        }
        totals = {request.spec.request_id: request.spec.num_inference_steps for request in before.requests}
        if any(totals[name] <= part.steps_done for name, part in inherited.items()):
            return []
        try:
            run, promises = self._build_run(assignment, requests, now_s, inherited)
        except ProfileError:
            return []
        leg = run.legs[0]
        if Stage.DIFFUSE not in leg.stages or leg.workers != before.plan.workers:
            return []
        run.follow(before, line[-1])
        self._takeovers.begin(before, run)
        self._pool.reserve(assignment.diffuse, run.run_id, run.diffuse_end_s)
        for later, seconds in promises:
            self._pool.promise(later.workers, run.run_id, seconds)
        effects = self._send_leg([run], leg, now_s, assignment.reason)
        run.expect_diffuse_end(run.diffuse_end_s + before.step_s)
        return [*_stop_line(line, assignment.reason), *effects]

    def _send_rest_ahead(self, run: Run, now_s: float) -> list[ev.Effect]:
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
            rest, promises = self._build_run(assignment, left, now_s, inherited, is_exact=True)
        except ProfileError:
            return []
        effects = self._send_decode_ahead(run, plan, names, now_s)
        rest.follow(run, plan)
        self._ledger.resume_run(rest)
        self._pool.reserve(assignment.diffuse, rest.run_id, rest.diffuse_end_s)
        for later, seconds in promises:
            self._pool.promise(later.workers, rest.run_id, seconds)
        effects += self._send_leg([rest], rest.legs[0], now_s, f"goes on when others of plan {plan.plan_id} end")
        rest.requests.clear()
        return effects

    def _send_decode_ahead(
        self, run: Run, plan: DispatchPlan, going_on: Collection[str], now_s: float
    ) -> list[ev.Effect]:
        """C of the members of a plan that end with it, but for those that go on, where it runs on the same workers."""
        leg = next(iter(run.legs), None)
        if leg is None or leg.stages != (Stage.DECODE,) or leg.workers[0] != plan.leader:
            return []
        if not can_run_as_planned(self._pool, plan.model, leg):
            return []
        ending = [each for each in run.requests if each.spec.request_id not in going_on]
        members = tuple(
            PlanMember(each.spec.request_id, None, plan.plan_id, plan.leader, inherited=True) for each in ending
        )
        decode = DispatchPlan(
            plan_id=self._ledger.make_id(),
            model=plan.model,
            stages=leg.stages,
            workers=leg.workers,
            members=members,
            group=self._pool.group_name(leg.workers) if len(leg.workers) > 1 else None,
            decode_degree=self._times.decode_degree(plan.model, leg),
            takes_over=plan.plan_id,
        )
        run.note_decode_ahead(decode)
        self._ledger.send_ahead(decode, run)
        self._pool.release(run.workers, run.run_id)
        self._pool.start(decode, self._times.decode_s([each.spec for each in ending], len(leg.workers)), now_s)
        return [ev.RunPlan(decode, f"sent ahead of the end of plan {plan.plan_id}")]

    def preempt(self, preemption: Preemption) -> list[ev.Effect]:
        """Let the run of a request yield. Ignored where nothing runs, or nothing is to be gained."""
        request = self._ledger.requests.get(preemption.request_id)
        run = request.run if request is not None else None
        if run is None or run.plan is None or not run.preempt():
            return []
        line = [run.plan, *(each.plan for each in run.followers if each.plan is not None)]
        return _stop_line(line, preemption.reason)

    def send_due(self, now_s: float) -> list[ev.Effect]:
        """Send each waiting E and C that a worker can take now."""
        effects: list[ev.Effect] = []
        for runs, leg, reason in self._encodes.take_due(now_s):
            effects += self._send_or_requeue(runs, leg, now_s, reason)
        for run, leg, reason in self._decodes.take_due(now_s):
            effects += self._send_or_requeue([run], leg, now_s, reason)
        return effects

    def finish_plan(self, event: ev.StageFinished, now_s: float) -> list[ev.Effect]:
        """A plan has ended well."""
        return self._end_in_line(event.plan_id, now_s, lambda: self._take_in_finish(event, now_s))

    def _end_in_line(self, plan_id: int, now_s: float, take_in: Callable[[], list[ev.Effect]]) -> list[ev.Effect]:
        """Take in the end of a plan, which others may follow, or which may follow another."""
        effects = self._takeovers.leave_line(plan_id)
        run, ended = self._ledger.find_lone_run(plan_id), self._takeovers.recall(plan_id)
        effects += take_in()
        if run is not None and not run.requests:  # a plan that was to let others through, or that nobody waits for
            self._ledger.end_run(run)
        begun, dropped = self._takeovers.close(ended)
        effects += dropped
        return effects if begun is None else [*effects, *self._begin_in_line(begun, now_s)]

    def _begin_in_line(self, run: Run, now_s: float) -> list[ev.Effect]:
        """The plan of a run begins, behind C of those that have ended where that is on the same workers."""
        plan = run.plan
        if plan is not None and plan.stages[0] is Stage.DIFFUSE:
            begins_s = self._pool.find_start_s(plan, now_s)
            run.expect_diffuse_end(begins_s + run.num_steps * run.step_s)
            run.open_from(begins_s)
        return self._send_rest_ahead(run, now_s)

    def _take_in_finish(self, event: ev.StageFinished, now_s: float) -> list[ev.Effect]:
        ended = self._ledger.end_plan(event.plan_id, now_s)
        if ended is None:
            return []
        plan, runs = ended
        num_steps = plan.num_steps if event.num_steps is None else event.num_steps
        self._times.observe(plan, max(runs, key=lambda run: run.spec.num_outputs), event.spans, num_steps)
        ran = [span.stage for span in event.spans]
        return [effect for run in runs for effect in self._continue_run(plan, run, ran, num_steps, now_s)]

    def end_stopped_plan(self, event: ev.PlanStopped, now_s: float) -> list[ev.Effect]:
        """A plan has ended that nobody waits for, or had nothing to continue with."""
        return self._end_in_line(event.plan_id, now_s, lambda: self._take_in_stop(event, now_s))

    def _take_in_stop(self, event: ev.PlanStopped, now_s: float) -> list[ev.Effect]:
        _, runs = self._ledger.end_plan(event.plan_id, now_s) or (None, [])
        return [effect for run in runs for effect in self._ledger.requeue(run, "its plan had no inputs")]

    def fail_plan(self, event: ev.PlanFailed, now_s: float) -> list[ev.Effect]:
        """A plan has ended badly."""
        return self._end_in_line(event.plan_id, now_s, lambda: self._take_in_failure(event, now_s))

    def _take_in_failure(self, event: ev.PlanFailed, now_s: float) -> list[ev.Effect]:
        known = self._ledger.find_plan(event.plan_id)
        ended = self._ledger.end_plan(event.plan_id, now_s)
        if known is not None and known.group is not None:
            self._pool.break_group(known.workers)
        if ended is None:
            return []
        plan, runs = ended
        effects: list[ev.Effect] = []
        for run in runs:
            if len(plan.members) > 1:
                effects += self._ledger.requeue_individually(run, event.error, is_retry=event.retry)
            elif event.retry:
                effects += self._ledger.requeue(run, event.error)
            else:
                self._ledger.end_run(run)
                effects += [self._ledger.reject(request, event.code, event.error) for request in run.requests]
        return effects

    # Plans are sent.

    def _build_run(
        self,
        assignment: Assignment,
        requests: list[Request],
        now_s: float,
        inherited: Mapping[str, Inheritance] | None = None,
        is_exact: bool = False,
    ) -> tuple[Run, list[tuple[Leg, float]]]:
        """The run, and the seconds of its legs after D. Raises `ProfileError` where those of any leg are not known.
        `inherited`: see `Run.inherited`. `is_exact`: the steps in it are no estimates."""
        if requests[0].spec.whole:
            assignment = _make_whole(assignment)
        inherited = inherited or {}
        begun = {name: part.steps_done for name, part in inherited.items()}
        left_of = [
            request.spec.num_inference_steps - begun.get(request.spec.request_id, request.steps_done)
            for request in requests
        ]
        left = min(left_of)
        num_steps = left if assignment.num_steps is None else min(assignment.num_steps, left)
        finishing = left_of.count(num_steps)
        if inherited and not is_exact:  # some may have another number of steps left: C is a plan of its own
            finishing = min(finishing, len(requests) - 1)
        is_encoded = all(request.encoded or request.spec.request_id in inherited for request in requests)
        specs = [request.spec for request in requests]
        step_s = self._times.step_s(specs, len(assignment.diffuse))
        run = Run(
            run_id=self._ledger.make_id(),
            requests=requests,
            assignment=assignment,
            num_steps=num_steps,
            legs=merge_legs(assignment, not is_encoded, finishing),
            step_s=step_s,
            diffuse_end_s=now_s + num_steps * step_s,
            inherited=inherited,
            is_mixed=len({spec.shape for spec in specs}) > 1,
        )
        self._times.leg_s(run.legs[0], run, len(requests))
        if Stage.DIFFUSE not in run.legs[0].stages:
            encode_s = self._times.encode_s(specs, len(assignment.encode))
            free_s = max(self._pool.free_at_s(worker, now_s) for worker in assignment.encode)
            run.expect_diffuse_end(run.diffuse_end_s + (encode_s + free_s - now_s))
        after = [leg for leg in run.legs[1:] if Stage.DIFFUSE not in leg.stages]
        return run, [(leg, self._times.leg_s(leg, run, finishing)) for leg in after]

    def _run_next_leg(self, run: Run, now_s: float, reason: str) -> list[ev.Effect]:
        leg, model = run.legs[0], run.spec.model
        if leg.stages == (Stage.DECODE,) and not self._pool.holds(leg.workers[0], Replica(model, Stage.DIFFUSE)):
            self._decodes.add(run, reason)
            return []
        if self._encodes.accepts(run):
            self._encodes.add(run, self._times.leg_s(leg, run, len(run.requests)), reason)
            return []
        where = leg if can_run_as_planned(self._pool, model, leg) else self._places.find_leg(run, now_s)
        return self._send_or_requeue([run], where, now_s, reason)

    def _send_or_requeue(self, runs: Sequence[Run], leg: Leg | None, now_s: float, reason: str) -> list[ev.Effect]:
        """Send the next leg of these runs to its workers. Without any, the members go back to the queue."""
        if leg is None:
            return [effect for run in runs for effect in self._ledger.requeue(run, self._explain_nowhere(run))]
        return self._send_leg(runs, leg, now_s, reason)

    def _explain_nowhere(self, run: Run) -> str:
        """The reason why no workers can run the next leg of a run."""
        leg = run.legs[0]
        lost = [worker_id for worker_id in leg.workers if not self._pool.all_alive((worker_id,))]
        if lost:
            return f"{'+'.join(lost)} was lost before the plan started"
        return f"no worker holds {''.join(stage.letter for stage in leg.stages)} of {run.spec.model} any more"

    def _send_leg(self, runs: Sequence[Run], leg: Leg, now_s: float, reason: str) -> list[ev.Effect]:
        """One plan: of one run, or E of several."""
        run = max(runs, key=lambda run: run.spec.num_outputs)
        diffuses = Stage.DIFFUSE in leg.stages
        members: list[PlanMember] = []
        for each in runs:
            members += each.take_members(leg)
        plan = DispatchPlan(
            plan_id=self._ledger.make_id(),
            model=run.spec.model,
            stages=leg.stages,
            workers=leg.workers,
            members=tuple(members),
            group=self._pool.group_name(leg.workers) if len(leg.workers) > 1 else None,
            decode_degree=self._times.decode_degree(run.spec.model, leg),
            saves=self._checkpoints.choose_steps(run, leg.workers, leg.workers[0]) if diffuses else None,
            takes_over=run.predecessor.plan_id if run.predecessor is not None else None,
        )
        self._ledger.begin_plan(plan, runs)
        self._encodes.note_sent(plan)
        expected_s = self._times.leg_s(leg, run, len(members))
        if diffuses:
            run.expect_diffuse_end(now_s + expected_s)
            run.open_from(now_s)
        elif leg.stages == (Stage.DECODE,):
            self._pool.release(run.workers, run.run_id)
        self._pool.start(plan, expected_s, now_s)
        ahead = self._send_rest_ahead(run, now_s) if diffuses else []
        return [ev.RunPlan(plan, reason), *ahead]

    # Plans have ended.

    def _continue_run(
        self, plan: DispatchPlan, run: Run, ran: Sequence[Stage], num_steps: int, now_s: float
    ) -> list[ev.Effect]:
        """The plan of a run has ended well, after the stages `ran` and `num_steps` steps of D."""
        run.end_plan(plan, ran, num_steps)
        if Stage.DECODE in ran:
            effects = []
            for request in run.list_members_of(plan):
                run.leave(request)
                effects.append(self._finish_request(request, now_s))
            self._ledger.end_run(run)
            return effects
        if Stage.DIFFUSE in plan.stages:
            self._end_diffuse(plan, run, ran)
        elif run.yielding:
            self._return_to_queue(run, run.requests)
        if run.decode_ahead is not None and run.requests:
            if self._ledger.find_plan(run.decode_ahead.plan_id) is not None:
                run.begin_decode_ahead()
                return []
            run.forget_decode_ahead()
        if run.legs and run.requests:
            stages = "".join(stage.letter for stage in plan.stages)
            return self._run_next_leg(run, now_s, f"{stages} of plan {plan.plan_id} is done")
        self._ledger.end_run(run)
        return []

    def _end_diffuse(self, plan: DispatchPlan, run: Run, ran: Sequence[Stage]) -> None:
        """D's workers are free. Members with steps left wait for another dispatch, or are in the plan that takes over;
        the others continue with C."""
        self._pool.free(run.assignment.diffuse, run.run_id)
        for request in [request for request in run.requests if request.steps_left > 0]:
            heir = self._takeovers.find_heir(run, request, plan.plan_id) if Stage.DIFFUSE in ran else None
            if heir is not None:
                run.hand_on(request, heir)
            else:
                self._return_to_queue(run, [request])
        if run.requests and not run.legs:
            run.add_decode(plan)

    def _return_to_queue(self, run: Run, requests: Sequence[Request]) -> None:
        for request in list(requests):
            run.leave(request)
            self._ledger.wait(request)

    def _finish_request(self, request: Request, now_s: float) -> ev.Effect:
        self._ledger.forget(request)
        latency_s = now_s - request.arrival_s
        verdict = "in time" if latency_s <= request.slo_s else f"late by {latency_s - request.slo_s:.2f} s"
        return ev.Finish(request.spec.request_id, latency_s, request.slo_s, verdict)


def _stop_line(line: Sequence[DispatchPlan], reason: str) -> list[ev.Effect]:
    """Stop a plan, and those that follow it. The last is told first: else it could begin when the one before has
    stopped, without the members that have left that in the meantime."""
    return [ev.Yield(plan.plan_id, reason) for plan in reversed(line)]


def _make_whole(assignment: Assignment) -> Assignment:
    """The assignment with all steps of D, and C behind them, whatever a policy that counts on segments has decided."""
    return replace(assignment, num_steps=None, decode=assignment.decode or assignment.diffuse[:1])
