"""The Resource-Aware Dispatcher: D by an integer program, then E and C (TridentServe, arXiv 2510.02838, section 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dispatch.assignment.assigning import Assigner, Choice
from dispatch.candidates.classes import Members, by_deadline, problem_of, waiting_by_work
from dispatch.candidates.narrowing import narrowing
from dispatch.candidates.overdue import hold_back, longest_overdue
from dispatch.candidates.tick_view import Outlook
from dispatch.candidates.work import Work
from dispatch.options import DispatchOptions
from dispatch.solver.ilp import solve
from dispatch.solver.problem import Slot, Solution
from dispatch.workers.memory_fit import Fits
from dispatch.workers.snapshot import Fleet, fleet_of
from tridentserve.protocols import Assignment, ClusterView, Decisions, StageTimes, WorkerView
from tridentserve.requests import RequestSpec


@dataclass(frozen=True, slots=True)
class TickPlan:
    """What one tick decides. `gap`: how much more than this choice of D another could be worth at most, relative
    to it; proved."""

    assignments: Sequence[Assignment] = ()
    gap: float = 0.0


class IlpDispatcher:
    """Satisfies `tridentserve.protocols.Dispatcher`. The same view gives the same assignments, unless the solver's time
    limit cuts a search short; what is kept between calls only saves time."""

    def __init__(self, times: StageTimes, options: DispatchOptions | None = None) -> None:
        self._times = times
        self._options = options or DispatchOptions()
        self._fits = Fits(times, self._options)
        self._fleet: Fleet | None = None

    def decide(self, view: ClusterView) -> Decisions:
        """Assignments only, earliest deadline first: nothing is preempted or refused. A request that the profile
        does not cover, or that no worker could ever run, waits: `can_ever_run` tells which and why. E is empty for a
        request that has its condition."""
        return Decisions(self.plan(view).assignments)

    def plan(self, view: ClusterView) -> TickPlan:
        """The assignments of `decide`, with how good they are."""
        if not view.pending or not view.workers:
            return TickPlan()
        known, workers = self._fleet, view.workers
        self._fleet = known.seen(workers) if known is not None else fleet_of(workers, self._fits.unit_of)
        outlook = self._outlook(self._fleet, view.now_s)
        if not outlook.any_idle:
            return TickPlan()
        waiting = waiting_by_work(view.pending, outlook.models_with_idle())
        outlook.narrowing = narrow = narrowing(waiting, outlook, self._options.rewards)
        overdue = []
        if self._options.overdue_first:
            firsts = sorted((requests[0] for requests in waiting.values()), key=by_deadline)
            overdue = longest_overdue(firsts, outlook)
            if held := hold_back(overdue, outlook):
                outlook = self._outlook(self._fleet.replacing(held), view.now_s)
                outlook.narrowing = narrow
        members, problem = problem_of(waiting, overdue, outlook)
        if not problem.classes:
            return TickPlan()
        solution = solve(problem, self._options)
        assigner = Assigner(self._times, self._options, outlook, waiting)
        assignments = assigner.assign(_choices(solution, members, outlook), solution.found_by)
        return TickPlan(assignments, solution.gap(problem))

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        """None when some primary with its auxiliaries has the memory and the degrees for this request, else why not."""
        survey = Outlook(self._times, self._options, workers, now_s=0.0).survey(Work.of_spec(spec))
        if survey.candidates:
            return None
        return f"{spec.model} cannot make {spec.shape} here: {'; '.join(survey.obstacles)}"

    def _outlook(self, fleet: Fleet, now_s: float) -> Outlook:
        return Outlook(self._times, self._options, fleet, now_s, self._fits)


def _choices(solution: Solution, members: Sequence[Members], outlook: Outlook) -> list[Choice]:
    """The members of each class, earliest deadline first, onto the slots the class was given, fastest first."""
    choices: list[Choice] = []
    slots: defaultdict[int, list[Slot]] = defaultdict(list)
    for (index, slot), n in solution.counts.items():
        slots[index].extend([slot] * n)
    for index in sorted(slots):
        work = members[index].work
        candidates = {candidate.slot: candidate for candidate in outlook.survey(work).candidates}
        fastest_first = sorted(slots[index], key=lambda slot: (candidates[slot].run_s, slot))
        choices.extend(
            Choice(request, work, candidates[slot])
            for request, slot in zip(members[index].requests, fastest_first, strict=False)
        )
    return choices
