"""Plans that are sent behind others before these have ended: requests join a batch, or it goes on when some leave."""

from __future__ import annotations

from collections.abc import Sequence

from tridentserve.protocols import Assignment
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.runs.ledger import Ledger
from tridentserve.scheduling.runs.request import Request
from tridentserve.scheduling.runs.run import Run
from tridentserve.stages import Stage


class Takeovers:
    """The runs whose plans follow that of another run, its followers. The first may be the one with which the members
    of a batch go on that have steps left when others end: it has no members before. The last may be the one in which
    others join the batch: the members belong to it at once. When the plan of the run before has ended they are called
    back, so that its end is taken in as that of any other, and those with steps left are handed on."""

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

    def begin(self, run: Run, follower: Run) -> None:
        """The plan of a run will give way to that of its last follower, which has all its members."""
        run.give_all()
        self._ledger.end_run(run)
        self._ledger.begin_run(follower)

    def recall(self, plan_id: int) -> Run | None:
        """A plan has ended: its run has those members again which a follower still had. Returns the run if there are
        followers."""
        run = self._ledger.find_lone_run(plan_id)
        if run is None or not run.followers or run.plan is None or run.plan.plan_id != plan_id:
            return None
        for request in run.given:
            if request in run.followers[-1].requests:  # it has not been cancelled
                run.take_back(request)
                self._ledger.resume_run(run)
        return run

    def leave_line(self, plan_id: int) -> list[ev.Effect]:
        """A plan has ended before the one that it follows: those of the other's members that were to come through it
        belong to the other's run again, which stops at its next step boundary all the same if it was to give way."""
        run = self._ledger.find_lone_run(plan_id)
        head = run.head if run is not None else None
        if run is None or head is None:
            return []
        last = head.followers[-1]
        for request in head.given:
            if request in last.requests and (run is last or _find_input(last, request) == plan_id):
                head.take_back(request)
                self._ledger.resume_run(head)
        head.followers.remove(run)
        run.begin_behind(())
        if not run.requests:
            self._ledger.end_run(run)
        if run is last or last.requests or last.run_id not in self._ledger.runs:
            return []
        return self._ledger.drop_run(last, "its requests have ended")

    def find_heir(self, run: Run, request: Request, plan_id: int) -> Run | None:
        """The follower of a run in which a request continues that has steps left when the run's plan ends; None where
        no plan continues with it."""
        able = (each for each in run.followers if each.run_id in self._ledger.runs)
        return next((each for each in able if _find_input(each, request) == plan_id), None)

    def close(self, run: Run | None) -> tuple[Run | None, list[ev.Effect]]:
        """The end of the plan of a run has been taken in: the first follower's plan begins, or nobody is left in it.
        Returns the follower if its plan is to be carried out to its end. No later plan of the run, C of those that have
        ended, is taken over."""
        if run is None:
            return None, []
        followers = run.end_line()
        if not run.requests:
            self._ledger.end_run(run)
        # One whose requests have all been cancelled has been dropped, but not reported.
        alive = [each for each in followers if each.run_id in self._ledger.runs]
        if not alive:
            return None, []
        first, behind = alive[0], alive[1:]
        first.begin_behind(behind)
        if behind:
            self._pass_on(first, behind[-1])
            return None, []
        if not first.requests:
            return None, self._ledger.drop_run(first, "its requests have ended")
        self._correct(first)
        return first, []

    def _pass_on(self, run: Run, follower: Run) -> None:
        """The plan of a run begins, and gives way to that of a follower at once: its members belong to that one."""
        if not run.requests:
            return  # its report comes all the same
        self._correct(run)
        run.give_all()
        self._ledger.end_run(run)
        for request in run.given:
            follower.requests.append(request)
            request.join(follower)

    def _correct(self, run: Run) -> None:
        """The steps of a plan that begins are known."""
        plan = run.plan
        assert plan is not None
        begun = {request.spec.request_id: request.steps_done for request in run.requests}
        totals = {request.spec.request_id: request.spec.num_inference_steps for request in run.requests}
        self._ledger.correct_plan(run, plan.correct_steps(begun, totals))


def _find_input(run: Run, request: Request) -> int | None:
    """The plan whose outputs a member of a run's plan begins with; None where it is no member."""
    if run.plan is None:
        return None
    return next((each.input_id for each in run.plan.members if each.request_id == request.spec.request_id), None)
