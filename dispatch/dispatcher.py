"""The Resource-Aware Dispatcher: D by an integer program, then E and C (TridentServe, arXiv 2510.02838, section 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dispatch.auxiliaries import Auxiliaries
from dispatch.candidates import Candidate, Work
from dispatch.ilp import solve
from dispatch.options import DispatchOptions
from dispatch.outlook import Outlook
from dispatch.overdue import hold_back, longest_overdue
from dispatch.pools import IdleWorkers
from dispatch.problem import Problem, RequestClass, Slot, Solution
from tridentserve.plans import WorkerId
from tridentserve.protocols import Assignment, ClusterView, Decisions, PendingRequest, StageTimes, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.stages import Stage

# Weight of the order of deadlines: it decides between requests that are worth the same, and nothing else.
_ORDER_WEIGHT = 1e-3


@dataclass(frozen=True, slots=True)
class _Choice:
    """A request with the slot that the solution gives it."""

    pending: PendingRequest
    work: Work
    candidate: Candidate


class IlpDispatcher:
    """Satisfies `tridentserve.protocols.Dispatcher`. Pure: the same input gives the same assignments, unless the
    solver's time limit cuts a search short."""

    def __init__(self, times: StageTimes, options: DispatchOptions | None = None) -> None:
        self._times = times
        self._options = options or DispatchOptions()

    def decide(self, view: ClusterView) -> Decisions:
        """Assignments only: nothing is preempted and nothing refused."""
        return Decisions(self.dispatch(view.pending, view.workers, view.now_s))

    def dispatch(
        self, pending: Sequence[PendingRequest], workers: Sequence[WorkerView], now_s: float
    ) -> list[Assignment]:
        """Assignments, earliest deadline first. A request that the profile does not cover, or that no worker could
        ever run, waits: `can_ever_run` tells which and why. E is empty for a request whose D was stopped before: its
        condition is in its state."""
        if not pending or not workers:
            return []
        outlook = Outlook(self._times, self._options, workers, now_s)
        if not outlook.any_idle:
            return []
        by_deadline = sorted(pending, key=_by_deadline)
        overdue = longest_overdue(by_deadline, outlook)
        free = hold_back(overdue, outlook, workers)
        if free != tuple(workers):
            outlook = Outlook(self._times, self._options, free, now_s)
        members, problem = _problem(by_deadline, overdue, outlook)
        if not problem.classes:
            return []
        solution = solve(problem, self._options)
        return self._assign(_choices(solution, members, outlook), outlook, solution)

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        """None when some primary with its auxiliaries has the memory and the degrees for this request, else why not."""
        survey = Outlook(self._times, self._options, workers, now_s=0.0).survey(Work.of_spec(spec))
        if survey.candidates:
            return None
        return f"{spec.model} cannot make {spec.shape} here: {'; '.join(survey.obstacles)}"

    def _assign(self, choices: Sequence[_Choice], outlook: Outlook, solution: Solution) -> list[Assignment]:
        """Concrete workers: primaries for the widest first, then auxiliaries for the earliest deadline first."""
        pools, auxiliaries, now_s = outlook.pools, outlook.auxiliaries, outlook.now_s
        idle = [IdleWorkers(pool) for pool in pools]
        taken: dict[str, tuple[WorkerId, ...]] = {}
        for choice in sorted(choices, key=lambda choice: (-choice.candidate.slot.degree, _by_deadline(choice.pending))):
            slot = choice.candidate.slot
            workers = idle[slot.pool].take(slot.degree)
            if workers is not None:
                taken[choice.pending.spec.request_id] = workers
                auxiliaries.occupy(workers, choice.candidate.diffuse_end_s(now_s))
        nodes = {worker.worker_id: worker.node_id for pool in pools for node in pool.nodes for worker in node}
        return [
            self._assignment(choice, taken[choice.pending.spec.request_id], auxiliaries, nodes, solution, now_s)
            for choice in sorted(choices, key=lambda choice: _by_deadline(choice.pending))
            if choice.pending.spec.request_id in taken
        ]

    def _assignment(
        self,
        choice: _Choice,
        diffuse: tuple[WorkerId, ...],
        auxiliaries: Auxiliaries,
        nodes: Mapping[WorkerId, str],
        solution: Solution,
        now_s: float,
    ) -> Assignment:
        work, candidate, near = choice.work, choice.candidate, nodes[diffuse[0]]
        encode, encode_end_s = diffuse, now_s + candidate.encode_s
        if not work.needs_encode:
            encode = ()
        elif Stage.ENCODE not in candidate.primary.stages:
            able = auxiliaries.able(work.model, Stage.ENCODE, work.shape, work.num_outputs)
            chosen, encode_end_s = auxiliaries.take(able, now_s, candidate.encode_s, near)
            encode = (chosen,)
        diffuse_end_s = encode_end_s + candidate.diffuse_s
        decode, finish_s = diffuse[:1], diffuse_end_s + candidate.decode_s
        if Stage.DECODE not in candidate.primary.stages:
            able = auxiliaries.able(work.model, Stage.DECODE, work.shape, work.num_outputs)
            chosen, finish_s = auxiliaries.take(able, diffuse_end_s, candidate.decode_s, near)
            decode = (chosen,)
        slack_s = choice.pending.deadline_s - finish_s
        method = f"{solution.method} ({solution.failure})" if solution.failure else solution.method
        verdict = f"{slack_s:.2f} s to spare" if slack_s >= 0 else f"late by {-slack_s:.2f} s"
        return Assignment(
            request_ids=(choice.pending.spec.request_id,),
            primary=candidate.primary,
            encode=encode,
            diffuse=diffuse,
            decode=decode,
            expected_finish_s=finish_s,
            reason=f"{candidate.primary} degree {candidate.slot.degree}, {verdict}, {method}",
        )


def _problem(
    by_deadline: Sequence[PendingRequest], overdue: Sequence[PendingRequest], outlook: Outlook
) -> tuple[list[list[PendingRequest]], Problem]:
    """The classes of identical requests, by earliest deadline, and the members of each. Each of `overdue` that has a
    slot now is a class of its own, which must get one."""
    first = {request.spec.request_id for request in overdue}
    grouped: defaultdict[tuple[Work, tuple[tuple[Slot, float], ...], bool], list[PendingRequest]] = defaultdict(list)
    for request in by_deadline:
        work = Work.of(request)
        if values := outlook.appraisal(work).values(request.deadline_s):
            key = (work, tuple(sorted(values.items())), request.spec.request_id in first)
            grouped[key].append(request)
    classes = [
        RequestClass(
            count=len(requests),
            values={slot: value + _ORDER_WEIGHT * (1 - rank / len(grouped)) for slot, value in values},
            required=required,
        )
        for rank, ((_, values, required), requests) in enumerate(grouped.items())
    ]
    return list(grouped.values()), Problem(tuple(classes), outlook.idle)


def _choices(solution: Solution, members: list[list[PendingRequest]], outlook: Outlook) -> list[_Choice]:
    """The members of each class, earliest deadline first, onto the slots the class was given, fastest first."""
    choices: list[_Choice] = []
    slots: defaultdict[int, list[Slot]] = defaultdict(list)
    for (index, slot), n in solution.counts.items():
        slots[index].extend([slot] * n)
    for index in sorted(slots):
        work = Work.of(members[index][0])
        candidates = {candidate.slot: candidate for candidate in outlook.survey(work).candidates}
        fastest_first = sorted(slots[index], key=lambda slot: (candidates[slot].run_s, slot))
        choices.extend(
            _Choice(request, work, candidates[slot])
            for request, slot in zip(members[index], fastest_first, strict=False)
        )
    return choices


def _by_deadline(request: PendingRequest) -> tuple[float, float, str]:
    return request.deadline_s, request.arrival_s, request.spec.request_id
