"""Plans that take over others at their next step boundary, so that requests join a batch without a round trip."""

from __future__ import annotations

from collections.abc import Sequence

from tridentserve.protocols import Assignment
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.ledger import Ledger
from tridentserve.scheduling.runs import Request, Run
from tridentserve.stages import Stage


class Takeovers:
    """Members of a run whose plan is taken over belong to its successor at once. When the plan has ended they are
    called back, so that its end is taken in as that of any other, and those with steps left are handed on."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def find_run(self, assignment: Assignment, requests: Sequence[Request], now_s: float) -> Run | None:
        """The run whose plan this assignment of these requests takes over; None where none can be, or not yet: plans
        that were taken over before their first step, again and again, would get nowhere."""
        runs = {request.run.run_id: request.run for request in requests if request.run is not None}
        run = next(iter(runs.values()), None)
        if run is None or len(runs) > 1 or run.plan is None or run.is_stopping or now_s < run.open_s:
            return None
        staying = [request for request in requests if request.run is run]
        is_whole = len(staying) == len(run.requests) == len(run.plan.members) < len(requests)
        if not is_whole or Stage.DIFFUSE not in run.plan.stages or run.plan.workers != assignment.diffuse:
            return None
        return run

    def begin(self, run: Run, successor: Run) -> None:
        """The plan of a run will be taken over by that of its successor."""
        run.give_to(successor)
        self._ledger.end_run(run)
        self._ledger.begin_run(successor)

    def recall(self, plan_id: int) -> Run | None:
        """A plan has ended: its run has those members again which its successor still had. Returns the run if its plan
        was to be taken over."""
        run = self._ledger.find_lone_run(plan_id)
        if run is None or run.successor is None:
            return None
        for request in run.given:
            if request in run.successor.requests:  # it has not been cancelled
                run.take_back(request)
                self._ledger.resume_run(run)
        return run

    def give_back(self, plan_id: int) -> None:
        """A plan has failed before it took over another: those of its members that run in the other one belong to that
        one's run again, which stops at its next step boundary all the same."""
        run = self._ledger.find_lone_run(plan_id)
        before = self._ledger.find_lone_run(run.predecessor.plan_id) if run is not None and run.predecessor else None
        if run is None or before is None or before.successor is not run:
            return
        for request in before.given:
            if request in run.requests:
                before.take_back(request)
                self._ledger.resume_run(before)
        before.part_from_successor()

    def find_successor(self, run: Run | None) -> Run | None:
        """The successor of a run, as long as its plan has not ended either."""
        successor = run.successor if run is not None else None
        if successor is None or successor.plan is None or successor.run_id not in self._ledger.runs:
            return None
        return successor if self._ledger.find_plan(successor.plan.plan_id) is not None else None

    def close(self, run: Run | None) -> list[ev.Effect]:
        """The end of the plan of a run has been taken in: its successor's plan has begun, or nobody is left in it. No
        later plan of the run, C of those that have ended, is taken over."""
        successor = self.find_successor(run)
        if run is not None:
            run.part_from_successor()
        if successor is None or successor.plan is None:
            return []
        if not successor.requests:
            return self._ledger.drop_run(successor, "its requests have ended")
        begun = {request.spec.request_id: request.steps_done for request in successor.requests}
        totals = {request.spec.request_id: request.spec.num_inference_steps for request in successor.requests}
        self._ledger.correct_plan(successor, successor.plan.correct_steps(begun, totals))
        return []
