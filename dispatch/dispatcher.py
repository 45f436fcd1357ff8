"""The Resource-Aware Dispatcher: D by an integer program, then E and C (TridentServe, arXiv 2510.02838, section 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dispatch.auxiliaries import Auxiliaries
from dispatch.candidates import Candidate, Surveyor, Work
from dispatch.ilp import solve
from dispatch.options import DispatchOptions
from dispatch.pools import IdleWorkers, Pool, primary_pools
from dispatch.problem import Problem, RequestClass, Slot, Solution
from dispatch.rewards import Appraisal
from tridentserve.plans import WorkerId
from tridentserve.protocols import Assignment, PendingRequest, StageTimes, WorkerView
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

    def dispatch(
        self, pending: Sequence[PendingRequest], workers: Sequence[WorkerView], now_s: float
    ) -> list[Assignment]:
        """Assignments, earliest deadline first. A request that the profile does not cover, or that no worker could
        ever run, waits: `can_ever_run` tells which and why. E is empty for a request whose D was stopped before: its
        condition is in its state."""
        if not pending or not workers:
            return []
        pools, auxiliaries, surveyor = self._look(workers, now_s)
        if not any(any(pool.idle_per_node) for pool in pools):
            return []
        members, problem = self._problem(pending, pools, surveyor, now_s)
        if not problem.classes:
            return []
        solution = solve(problem, self._options)
        choices = _choices(solution, members, surveyor)
        return self._assign(choices, pools, auxiliaries, solution, now_s)

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        """None when some primary with its auxiliaries has the memory and the degrees for this request, else why not."""
        _, _, surveyor = self._look(workers, now_s=0.0)
        survey = surveyor.survey(Work.of_spec(spec))
        if survey.candidates:
            return None
        return f"{spec.model} cannot make {spec.shape} here: {'; '.join(survey.obstacles)}"

    def _look(self, workers: Sequence[WorkerView], now_s: float) -> tuple[tuple[Pool, ...], Auxiliaries, Surveyor]:
        pools = primary_pools(workers)
        auxiliaries = Auxiliaries(workers, self._times, self._options.handoff_reserve_bytes, now_s)
        return pools, auxiliaries, Surveyor(self._times, self._options, pools, auxiliaries, now_s)

    def _problem(
        self, pending: Sequence[PendingRequest], pools: Sequence[Pool], surveyor: Surveyor, now_s: float
    ) -> tuple[list[list[PendingRequest]], Problem]:
        """The classes of identical requests, by earliest deadline, and the members of each."""
        idle = tuple(pool.idle_per_node for pool in pools)
        widest = [max(nodes) for nodes in idle]
        appraisals: dict[Work, Appraisal] = {}
        grouped: dict[tuple[Work, tuple[tuple[Slot, float], ...]], list[PendingRequest]] = defaultdict(list)
        for request in sorted(pending, key=_by_deadline):
            work = Work.of(request)
            if work not in appraisals:
                tokens = work.shape.tokens * work.num_outputs
                candidates = surveyor.survey(work).candidates
                appraisals[work] = Appraisal(candidates, widest, tokens, now_s, self._options.rewards)
            values = appraisals[work].values(request.deadline_s)
            if values:
                grouped[work, tuple(sorted(values.items()))].append(request)
        classes = [
            RequestClass(
                count=len(requests),
                values={slot: value + _ORDER_WEIGHT * (1 - rank / len(grouped)) for slot, value in values},
            )
            for rank, ((_, values), requests) in enumerate(grouped.items())
        ]
        return list(grouped.values()), Problem(tuple(classes), idle)

    def _assign(
        self,
        choices: Sequence[_Choice],
        pools: Sequence[Pool],
        auxiliaries: Auxiliaries,
        solution: Solution,
        now_s: float,
    ) -> list[Assignment]:
        """Concrete workers: primaries for the widest first, then auxiliaries for the earliest deadline first."""
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
            request_id=choice.pending.spec.request_id,
            primary=candidate.primary,
            encode=encode,
            diffuse=diffuse,
            decode=decode,
            expected_finish_s=finish_s,
            reason=f"{candidate.primary} degree {candidate.slot.degree}, {verdict}, {method}",
        )


def _choices(solution: Solution, members: list[list[PendingRequest]], surveyor: Surveyor) -> list[_Choice]:
    """The members of each class, earliest deadline first, onto the slots the class was given, fastest first."""
    choices: list[_Choice] = []
    slots: defaultdict[int, list[Slot]] = defaultdict(list)
    for (index, slot), n in solution.counts.items():
        slots[index].extend([slot] * n)
    for index in sorted(slots):
        work = Work.of(members[index][0])
        candidates = {candidate.slot: candidate for candidate in surveyor.survey(work).candidates}
        fastest_first = sorted(slots[index], key=lambda slot: (candidates[slot].run_s, slot))
        choices.extend(
            _Choice(request, work, candidates[slot])
            for request, slot in zip(members[index], fastest_first, strict=False)
        )
    return choices


def _by_deadline(request: PendingRequest) -> tuple[float, float, str]:
    return request.deadline_s, request.arrival_s, request.spec.request_id
