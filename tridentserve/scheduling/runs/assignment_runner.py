"""Carries out assignments: sends the plans of a run one after another, and takes in how each of them ended."""

from __future__ import annotations

from collections.abc import Sequence

from tridentserve.errors import ProfileError
from tridentserve.plans import DispatchPlan, Replica
from tridentserve.protocols import Assignment, Preemption
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.estimation.expected_times import ExpectedTimes
from tridentserve.scheduling.runs.auxiliary_queues import DecodeQueue, EncodeQueue, OtherPlaces, can_run_as_planned
from tridentserve.scheduling.runs.checkpoint_schedule import CheckpointSchedule
from tridentserve.scheduling.runs.ledger import Ledger
from tridentserve.scheduling.runs.legs import Leg
from tridentserve.scheduling.runs.plan_sender import PlanSender
from tridentserve.scheduling.runs.plans_ahead import PlansAhead
from tridentserve.scheduling.runs.request import Request
from tridentserve.scheduling.runs.run import Run
from tridentserve.scheduling.runs.takeovers import Takeovers
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
        self._takeovers = Takeovers(ledger)
        self._sender = PlanSender(ledger, pool, times, encodes, checkpoints)
        self._ahead = PlansAhead(ledger, self._takeovers, pool, times, self._sender)

    def start(self, assignment: Assignment, now_s: float) -> list[ev.Effect]:
        """Begin a run of requests that wait, or that join a running batch."""
        if assignment.takes_over:
            return self._ahead.take_over(assignment, now_s)
        requests = [self._ledger.requests[request_id] for request_id in assignment.request_ids]
        try:
            run, promises = self._sender.build_run(assignment, requests, now_s)
        except ProfileError as error:  # nothing has changed yet
            return [self._ledger.reject(request, "invalid_request", str(error)) for request in requests]
        self._ledger.begin_run(run)
        self._sender.reserve(run, promises)
        return self._run_next_leg(run, now_s, assignment.reason)

    def preempt(self, preemption: Preemption) -> list[ev.Effect]:
        """Let the run of a request yield. Ignored where nothing runs, or nothing is to be gained."""
        request = self._ledger.requests.get(preemption.request_id)
        run = request.run if request is not None else None
        if run is None or run.plan is None or not run.preempt():
            return []
        return self._ahead.stop(run, preemption.reason)

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
        return self._ahead.end_plan(event.plan_id, now_s, lambda: self._take_in_finish(event, now_s))

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
        return self._ahead.end_plan(event.plan_id, now_s, lambda: self._take_in_stop(event, now_s))

    def _take_in_stop(self, event: ev.PlanStopped, now_s: float) -> list[ev.Effect]:
        _, runs = self._ledger.end_plan(event.plan_id, now_s) or (None, [])
        return [effect for run in runs for effect in self._ledger.requeue(run, "its plan had no inputs")]

    def fail_plan(self, event: ev.PlanFailed, now_s: float) -> list[ev.Effect]:
        """A plan has ended badly."""
        return self._ahead.end_plan(event.plan_id, now_s, lambda: self._take_in_failure(event, now_s))

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
        sent = self._sender.send_leg(runs, leg, now_s, reason)
        return [*sent, *(self._ahead.send_rest(runs[0], now_s) if Stage.DIFFUSE in leg.stages else ())]

    def _explain_nowhere(self, run: Run) -> str:
        """The reason why no workers can run the next leg of a run."""
        leg = run.legs[0]
        lost = [worker_id for worker_id in leg.workers if not self._pool.all_alive((worker_id,))]
        if lost:
            return f"{'+'.join(lost)} was lost before the plan started"
        return f"no worker holds {''.join(stage.letter for stage in leg.stages)} of {run.spec.model} any more"

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
