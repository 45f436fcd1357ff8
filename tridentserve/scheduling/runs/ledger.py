"""The scheduler's ledger: requests that have not ended, the runs that carry them out, the plans workers have."""

from __future__ import annotations

from collections.abc import Sequence

from tridentserve.plans import DispatchPlan, WorkerId
from tridentserve.protocols import PendingRequest
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.runs.request import KeptOutput, Request
from tridentserve.scheduling.runs.run import Run
from tridentserve.scheduling.workers.worker_pool import WorkerPool


class Ledger:
    """Requests that wait and run, and the plans that workers have.

    Requests whose plan or worker was lost go back to the queue here."""

    def __init__(self, pool: WorkerPool, max_retries: int) -> None:
        self._pool = pool
        self._max_retries = max_retries
        self.requests: dict[str, Request] = {}
        # The dispatcher's views of those that wait for a dispatch.
        self.pending: dict[str, PendingRequest] = {}
        self.runs: dict[int, Run] = {}
        # Plans given to workers and not reported yet, with their runs; also plans that nobody waits for any more.
        self._plans: dict[int, tuple[DispatchPlan, tuple[Run, ...]]] = {}
        self._last_id = 0

    def make_id(self) -> int:
        """Make the id of a run or a plan, greater than all before."""
        self._last_id += 1
        return self._last_id

    # Requests.

    def wait(self, request: Request) -> None:
        """The request waits for a dispatch."""
        request.wait()
        self.pending[request.spec.request_id] = request.make_view()

    def reject(self, request: Request, code: str, reason: str) -> ev.Reject:
        self.forget(request)
        return ev.Reject(request.spec.request_id, code, reason)

    def cancel(self, request: Request, code: str, why: str) -> list[ev.Effect]:
        """A request ends without a result, whatever has become of it. Its plan is stopped if nobody else waits for
        it."""
        effects: list[ev.Effect] = []
        if (run := request.run) is not None:
            run.leave(request)
            if not run.requests:
                effects += self.drop_run(run, why)
        return [*effects, self.reject(request, code, why)]

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self.pending.pop(request.spec.request_id, None)
        del self.requests[request.spec.request_id]

    # Runs and plans.

    def begin_run(self, run: Run) -> None:
        """A run begins; its requests no longer wait."""
        self.runs[run.run_id] = run
        for request in run.requests:
            self.pending.pop(request.spec.request_id, None)  # one whose batch others join does not wait
            request.join(run)

    def resume_run(self, run: Run) -> None:
        """A run that had ended has requests again."""
        self.runs[run.run_id] = run

    def end_run(self, run: Run) -> None:
        self._pool.release(run.workers, run.run_id)
        self.runs.pop(run.run_id, None)

    def drop_run(self, run: Run, why: str) -> list[ev.Effect]:
        """A run has no requests any more: its plan is stopped if nobody else waits for it."""
        self.end_run(run)
        if run.plan is None or self._is_wanted(run.plan):
            return []
        return [ev.Abort(run.plan.members[0].request_id, run.plan.plan_id, why)]

    def begin_plan(self, plan: DispatchPlan, runs: Sequence[Run]) -> None:
        """A plan of one run, or E of several."""
        for run in runs:
            run.begin_plan(plan)
        self._plans[plan.plan_id] = (plan, tuple(runs))

    def send_ahead(self, plan: DispatchPlan, run: Run) -> None:
        """A plan that becomes that of a run when the one that it has now has ended."""
        self._plans[plan.plan_id] = (plan, (run,))

    def correct_plan(self, run: Run, plan: DispatchPlan) -> None:
        """The plan of a run, which takes over another one, as it really is."""
        run.begin_taken_over(plan)
        self._plans[plan.plan_id] = (plan, (run,))

    def find_lone_run(self, plan_id: int) -> Run | None:
        """The run of a plan that has not been reported; None for E of several."""
        _, runs = self._plans.get(plan_id, (None, ()))
        return runs[0] if len(runs) == 1 else None

    def find_plan(self, plan_id: int) -> DispatchPlan | None:
        """A plan that has not been reported."""
        known = self._plans.get(plan_id)
        return known[0] if known is not None else None

    def has_requests_of(self, model: str) -> bool:
        return any(request.spec.model == model for request in self.requests.values())

    def has_plans_of(self, model: str) -> bool:
        """True when workers have plans of a model that have not been reported."""
        return any(plan.model == model for plan, _ in self._plans.values())

    def free_workers(self, plan_id: int, now_s: float) -> None:
        """All stages of a plan are done, and only its report is to come: its workers can take other plans."""
        plan, runs = self._plans.get(plan_id, (None, ()))
        if plan is None:
            return
        self._pool.end(plan, now_s)
        for run in runs:
            if run.plan is plan and not run.legs:
                self._pool.release(run.workers, run.run_id)
                run.note_computed()

    def end_plan(self, plan_id: int, now_s: float) -> tuple[DispatchPlan, list[Run]] | None:
        """Free a plan's workers. Returns the plan and those of its runs that somebody still waits for, if any."""
        plan, runs = self._plans.pop(plan_id, (None, ()))
        if plan is None:
            return None
        self._pool.end(plan, now_s)
        waiting = [run for run in runs if run.plan is plan and run.requests]
        return (plan, waiting) if waiting else None

    def _is_wanted(self, plan: DispatchPlan) -> bool:
        """True when a client still waits for a plan that has not been reported."""
        _, runs = self._plans.get(plan.plan_id, (plan, ()))
        return any(run.plan is plan and run.requests for run in runs)

    # Checkpoints and losses.

    def save(self, event: ev.CheckpointSaved) -> None:
        """A checkpoint of a running plan's states has arrived."""
        plan, runs = self._plans.get(event.plan_id, (None, ()))
        if plan is None or not self._pool.all_alive((event.keeper,)):
            return
        first = {member.request_id: member.steps[0] for member in plan.members if member.steps is not None}
        for request in (request for run in runs if run.plan is plan for request in run.requests):
            if (steps := first.get(request.spec.request_id)) is not None:
                request.save(KeptOutput(plan.plan_id, event.keeper, steps + event.num_steps, is_checkpoint=True))

    def lose_worker(self, worker_id: WorkerId, why: str) -> list[ev.Effect]:
        """Requests that wait and were kept there go back. Plans that run there are reported one by one."""
        self._pool.lose(worker_id)
        for request in self.requests.values():
            request.lose_holder(worker_id)
        kept = [name for name, pending in self.pending.items() if pending.held_by == worker_id]
        return [self._requeue_request(self.requests[name], why) for name in kept]

    def requeue(self, run: Run, why: str) -> list[ev.Effect]:
        """All members of a run go back to the queue, unless they have been there too often."""
        self.end_run(run)
        return [self._requeue_request(request, why) for request in run.requests]

    def requeue_individually(self, run: Run, why: str, is_retry: bool) -> list[ev.Effect]:
        """All members of a run whose batch failed go back to the queue, and share no batch from now on: the failure may
        be the fault of one of them, and must not end the others. `is_retry`: whether it counts as a retry."""
        self.end_run(run)
        effects: list[ev.Effect] = []
        for request in run.requests:
            is_counted = is_retry or request.spec.alone  # a policy that still shares it must not do so without end
            request.isolate()
            effects.append(self._requeue_request(request, why, is_counted))
        return effects

    def _requeue_request(self, request: Request, why: str, is_retry: bool = True) -> ev.Effect:
        if request.count_retry(is_retry) > self._max_retries:
            return self.reject(request, "worker_failed", f"gave up after {self._max_retries} retries: {why}")
        request.go_back(self._max_retries)
        self.wait(request)
        return ev.Requeue(request.spec.request_id, why, request.steps_done)
