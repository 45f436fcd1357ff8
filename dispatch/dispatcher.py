"""The Resource-Aware Dispatcher: D by an integer program, then E and C (TridentServe, arXiv 2510.02838, section 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dispatch.assignment.assigning import Assigner, Choice
from dispatch.assignment.batching import Batches, batch_first
from dispatch.candidates.arrivals import RecentArrivals
from dispatch.candidates.calm import LossMemory
from dispatch.candidates.candidate import Candidate
from dispatch.candidates.classes import Members, build_problem, by_deadline, group_by_work, leave_out
from dispatch.candidates.program import DEFAULT_PROGRAM, Program
from dispatch.candidates.survey import TickView
from dispatch.candidates.values import Pressure
from dispatch.candidates.weights import ModelWeights
from dispatch.candidates.work import KnownWork, Waiting, Work
from dispatch.holding.gathering import Gathering
from dispatch.holding.overdue import OverdueTurns
from dispatch.holding.reserve import ReservedTick, Reserver
from dispatch.options import NO_BATCHES, DispatchOptions
from dispatch.solver.ilp import solve
from dispatch.solver.problem import GroupKind, Solution
from dispatch.workers.memory_fit import MemoryCheck
from dispatch.workers.pools import WorkerSnapshot, take_snapshot
from tridentserve.protocols import Assignment, ClusterView, Decisions, StageTimes, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class TickPlan:
    """The decisions of one tick."""

    assignments: Sequence[Assignment]
    """Earliest deadline first."""
    gap: float
    """The proved bound on how much more another choice for D could be worth, relative to this one."""


_NOTHING_TO_DECIDE = TickPlan((), gap=0.0)


class IlpDispatcher:
    """Satisfies `tridentserve.protocols.Dispatcher`. The same views in the same order give the same assignments, unless
    the solver's time limit cuts a search short. Of what is past, only the latest arrivals count
    (`dispatch.candidates.arrivals`), when a request was last lost (`dispatch.candidates.calm`), and what was given to
    models with shares (`dispatch.candidates.weights`) and to requests that were long overdue
    (`dispatch.holding.overdue`), and for how long workers have waited for each other (`dispatch.holding.gathering`);
    what else is kept between calls saves time."""

    def __init__(
        self, times: StageTimes, options: DispatchOptions | None = None, program: Program = DEFAULT_PROGRAM
    ) -> None:
        self._program = program
        self._times = times
        self._options = options or DispatchOptions()
        self._memory = MemoryCheck(times, self._options)
        self._snapshot: WorkerSnapshot | None = None
        self._arrivals = RecentArrivals(self._options)
        self._reserver = Reserver(self._arrivals)
        self._weights = ModelWeights(self._options)
        self._work = KnownWork()
        self._losses = LossMemory(self._options.objective.calm)
        self._turns = OverdueTurns(self._options.overdue_share)
        self._gathering = Gathering(self._options)

    def decide(self, view: ClusterView) -> Decisions:
        """Assignments only, earliest deadline first: nothing is preempted or refused. A request that the profile
        does not cover, or that no worker could ever run, waits: `can_ever_run` says why. E is empty for a request
        that has its condition."""
        return Decisions(self.plan(view).assignments)

    def plan(self, view: ClusterView) -> TickPlan:
        """The assignments of `decide`, with how good they are."""
        if not view.pending or not view.workers:
            return _NOTHING_TO_DECIDE
        self._arrivals.note(view.pending)
        known, workers = self._snapshot, view.workers
        if not any(worker.idle for worker in workers):
            return _NOTHING_TO_DECIDE
        self._snapshot = known.update(workers) if known is not None else take_snapshot(workers, self._memory.find_unit)
        tick = self._build_tick(self._snapshot, view.now_s)
        if not tick.any_idle:
            return _NOTHING_TO_DECIDE
        load, segment_s = self._arrivals.expect(tick)
        reserved = None
        if self._options.keep_free:
            reserved = self._reserver.keep(self._snapshot, tick, view.pending, segment_s)
        if reserved is not None:
            tick = self._build_tick(reserved.snapshot, view.now_s, reserved)
        self._work.start_tick()
        waiting = group_by_work(view.pending, tick.list_idle_models(), self._work.find)
        tick.set_pressure(waiting, load)
        batches: Batches = {}
        if self._program.batches_first and self._options.batch_limit > NO_BATCHES:
            waiting, batches = self._batch_first(waiting, tick)
        tick.pressure.is_calm = self._losses.is_calm(waiting, tick)
        ahead = self._weights.find_ahead(waiting)
        firsts = [requests[0] for work, requests in waiting.items() if work.model not in ahead]
        overdue = self._turns.choose(sorted(firsts, key=by_deadline), tick)
        if held := self._turns.hold_back(overdue, tick):
            tick = self._build_tick(tick.snapshot.replace_views(held), view.now_s, reserved, tick.pressure)
        if (gathered := self._gathering.gather(waiting, overdue, tick)).views:
            waiting = leave_out(waiting, gathered.request_ids)
            tick = self._build_tick(tick.snapshot.replace_views(gathered.views), view.now_s, reserved, tick.pressure)
        members, problem = build_problem(waiting, overdue, tick, self._weights.weigh(waiting))
        if not problem.classes:
            return _NOTHING_TO_DECIDE
        solution = solve(problem, self._options)
        assigner = Assigner(self._times, self._options, tick, waiting, batches, segment_s)
        assignments = assigner.assign(_list_choices(solution, members, tick), solution.found_by)
        self._weights.note(waiting, assignments, view.now_s)
        self._turns.note(assignments, view.now_s)
        return TickPlan(assignments, solution.compute_gap(problem))

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        """None when some primary with its auxiliaries has the memory and the degrees for this request, else why not."""
        survey = TickView(self._times, self._options, workers, now_s=0.0).survey(Work.from_spec(spec))
        if survey.candidates:
            return None
        return f"{spec.model} cannot make {spec.shape} here: {'; '.join(survey.obstacles)}"

    def _build_tick(
        self,
        snapshot: WorkerSnapshot,
        now_s: float,
        reserved: ReservedTick | None = None,
        pressure: Pressure | None = None,
    ) -> TickView:
        kept, rules = (reserved.kept, reserved.rules) if reserved is not None else ((), {})
        return TickView(self._times, self._options, snapshot, now_s, self._memory, kept, rules, self._program, pressure)

    def _batch_first(self, waiting: Waiting, tick: TickView) -> tuple[Waiting, Batches]:
        """Batches of as many requests as are optimal for D at its optimal degree, and fit the memory."""

        def find_limit(work: Work) -> int:
            if not tick.survey(work).candidates:
                return 1
            degree = self._times.optimal_degree(work.model, Stage.DIFFUSE, work.shape)
            optimal = self._times.optimal_batch(work.model, Stage.DIFFUSE, work.shape, degree) // work.num_outputs
            sizes = range(min(self._options.batch_limit, optimal), 1, -1)
            return next((size for size in sizes if tick.survey(work._replace(batch=size)).candidates), 1)

        return batch_first(waiting, find_limit)


def _list_choices(solution: Solution, members: Sequence[Members], tick: TickView) -> list[Choice]:
    """The members of each class, earliest deadline first, onto the groups the class was given, fastest first."""
    choices: list[Choice] = []
    groups: defaultdict[int, list[GroupKind]] = defaultdict(list)
    for (index, group), n in solution.counts.items():
        groups[index].extend([group] * n)
    by_group: dict[int, dict[GroupKind, Candidate]] = {}  # by the identity of the work, which its classes share
    for index in sorted(groups):
        work, requests = members[index]
        if (candidates := by_group.get(id(work))) is None:
            candidates = {candidate.group: candidate for candidate in tick.survey(work).candidates}
            by_group[id(work)] = candidates
        mine = groups[index]
        if len(mine) > 1:
            mine.sort(key=lambda group: (candidates[group].run_s, group))
        choices.extend(
            [Choice(request, work, candidates[group]) for request, group in zip(requests, mine, strict=False)]
        )
    return choices
