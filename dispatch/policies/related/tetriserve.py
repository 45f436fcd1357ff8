"""TetriServe: deadline-aware rounds with step-level sequence parallelism (arXiv 2510.01565, section 4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dispatch.candidates.classes import by_deadline
from dispatch.options import DispatchOptions
from dispatch.policies.greedy.placements import co_locate
from dispatch.policies.greedy.work import count_steps_left
from dispatch.policies.policy import Policy, PolicyContext, register_policy
from dispatch.policies.related.round_packing import RoundRequest, count_steps_in_round, pack_round
from dispatch.policies.related.selective_batches import choose_company
from dispatch.policies.step_level.dispatcher import BatchCandidate, StepLevelDispatcher, StepTick
from dispatch.policies.step_level.worker_picker import WorkerPicker
from tridentserve.plans import WorkerId
from tridentserve.protocols import Assignment, ClusterView, Decisions, PendingRequest, RunningRequest, StageTimes

# Steps of the largest size that a round lasts, as a share of its steps: the paper finds 5 of 50 best (section 6.4).
ROUND_SHARE = 0.1
# No round lasts longer than this share of the shortest time from arrival to deadline of what waits, runs or came
# lately. In the paper's own setting (section 6.1) a round is at most a tenth of the largest size's 5 s, which is a
# third of the smallest size's 1.5 s.
SLO_SHARE = 1 / 3
# The number of latest requests that are remembered for it, so that rounds stay short between two short requests.
REMEMBERED = 100


class _Pace(NamedTuple):
    """All that is equal for the requests of a kind that have their condition, or for those that lack it."""

    candidates: Mapping[int, BatchCandidate]
    """The candidates by degree."""
    step_s: Mapping[int, float]
    """Seconds per step at each degree that they may use now."""
    fastest_s: float
    """Seconds per step at the fastest degree that they may ever use."""
    encode_s: float
    """Seconds until E has ended; 0 where E is done."""
    decode_s: float
    """Seconds of C, before which D must have ended."""


@dataclass(slots=True)
class _Chosen:
    """A request that runs in the round, at a degree that may still grow."""

    pending: PendingRequest
    request: RoundRequest
    candidates: Mapping[int, BatchCandidate]
    degree: int


@register_policy("tetriserve", needs_load=True)
def make_tetriserve(context: PolicyContext) -> Policy:
    """The whole pipeline is on every worker, as in the paper."""
    dispatcher = TetriServe(context.times, context.options)
    return Policy(dispatcher, co_locate(context.workers, context.load), replanner_wanted=False)


class TetriServe(StepLevelDispatcher):
    """Each round: the degrees that meet each deadline with the fewest GPU-seconds (4.2.1), the dynamic program of
    Algorithm 1 over the idle GPUs (4.2.2), the workers of the last round where the degree stays, then wider degrees on
    the workers that are left (4.2.3).

    A round begins when all segments of the last one that fit in it have ended, so a late one does not lose a round. It
    is as long as a tenth of the steps of the largest size that waits or runs (the paper's 5 of 50), and at least one
    step at its optimal degree; yet never longer than a third of the shortest SLO (time from arrival to deadline) of
    what waits, runs or came lately. Paper: "short enough to avoid excessive queueing delay" (4.2.2), with sizes whose
    SLOs differ by a factor of 3.3; where they differ more, a round of the largest size's steps is longer than the
    smallest size's SLO. A step that is longer than the round holds its workers beyond it, and a request whose SLO asks
    for a shorter round than the one that lasts ends it: the next one begins on the idle workers.

    With `dispatch.max_batch` above 1, small requests that got no workers share the steps of an identical one that did,
    where no deadline suffers (section 5, which says no more than this). The pools of a mixed cluster are packed one
    after the other. Remembered between calls: the requests of the last round and its end, the
    workers each request had, and the latest SLOs.
    """

    def __init__(self, times: StageTimes, options: DispatchOptions | None = None) -> None:
        super().__init__(times, options)
        self._in_round: frozenset[str] = frozenset()
        self._round_end_s = 0.0
        self._slos_s: dict[str, float] = {}
        self._had: dict[str, tuple[WorkerId, ...]] = {}

    def decide(self, view: ClusterView) -> Decisions:
        """The segments of a new round; nothing while a round lasts."""
        running = {request.spec.request_id for request in view.running}
        longest_s = self._find_longest_round(view)
        # A request that cannot wait for the end of a round that began before it came ends that round.
        if not view.pending or (self._in_round & running and self._round_end_s <= view.now_s + longest_s):
            return Decisions()
        tick = self._build_tick(view)
        round_s = min(longest_s, self._choose_round_seconds(tick, view))
        waiting = sorted(view.pending, key=by_deadline)
        known = running | {request.spec.request_id for request in waiting}
        self._had = {request_id: had for request_id, had in self._had.items() if request_id in known}
        assignments: list[Assignment] = []
        for index, pool in enumerate(tick.pools):
            chosen = _choose(tick, waiting, index, round_s)
            _scale_up(chosen, pool.idle_per_node)
            placed = self._place(chosen, WorkerPicker(pool))
            placed_ids = {each.pending.spec.request_id for each, _ in placed}
            waiting = [request for request in waiting if request.spec.request_id not in placed_ids]
            for each, workers in placed:
                company = choose_company(tick, index, each.pending, waiting) if each.degree == 1 else []
                made = _build_segment(tick, index, each, company, workers, round_s)
                assignments.append(made)
                self._had.update(dict.fromkeys(made.request_ids, workers))
                waiting = [request for request in waiting if request.spec.request_id not in made.request_ids]
        end_s = self._round_end_s = view.now_s + round_s * (1 + 1e-9)
        self._in_round = frozenset(
            request_id for each in assignments if each.expected_finish_s <= end_s for request_id in each.request_ids
        )
        return Decisions(assignments=tuple(assignments))

    def _find_longest_round(self, view: ClusterView) -> float:
        """The longest round that the shortest time from arrival to deadline allows."""
        active: list[PendingRequest | RunningRequest] = [*view.pending, *view.running]
        self._slos_s.update((each.spec.request_id, each.deadline_s - each.arrival_s) for each in active)
        known = {each.spec.request_id for each in active}
        for request_id in [name for name in self._slos_s if name not in known][:-REMEMBERED]:
            del self._slos_s[request_id]
        return SLO_SHARE * max(0.0, min(self._slos_s.values(), default=0.0))

    def _choose_round_seconds(self, tick: StepTick, view: ClusterView) -> float:
        """The longest of what each size asks of a round."""
        asked_s = 0.0
        specs = (*(each.spec for each in view.pending), *(each.spec for each in view.running))
        for spec in {(tick.kinds[spec.request_id], spec.num_inference_steps): spec for spec in specs}.values():
            for index in range(len(tick.pools)):
                candidates = tick.find_candidates(spec, index, encoded=True).values()
                fastest_s = min((candidate.step_s for candidate in candidates), default=0.0)
                optimal_s = min((candidate.step_s for candidate in candidates if candidate.efficient), default=0.0)
                asked_s = max(asked_s, max(1, round(ROUND_SHARE * spec.num_inference_steps)) * fastest_s, optimal_s)
        return asked_s

    def _place(self, chosen: Sequence[_Chosen], picker: WorkerPicker) -> list[tuple[_Chosen, tuple[WorkerId, ...]]]:
        """Place the requests: one that can keep the workers of the last round keeps them; the others follow, the widest
        first, near the workers that they had. Where idle workers lie apart, a narrower degree is used."""
        placed: list[tuple[_Chosen, tuple[WorkerId, ...]]] = []
        moving: list[_Chosen] = []
        for each in chosen:
            had = self._had.get(each.pending.spec.request_id, ())
            if len(had) == each.degree and picker.keep(had):
                placed.append((each, had))
            else:
                moving.append(each)
        for each in sorted(moving, key=lambda each: -each.degree):
            had = self._had.get(each.pending.spec.request_id, ())
            for degree in sorted(each.request.step_s, reverse=True):
                if degree <= each.degree and (workers := picker.take(degree, had)) is not None:
                    each.degree = degree
                    placed.append((each, workers))
                    break
        return placed


def _choose(tick: StepTick, waiting: Sequence[PendingRequest], pool: int, round_s: float) -> list[_Chosen]:
    """Minimal allocations and Algorithm 1 for the idle workers of one pool."""
    idle_per_node = tick.pools[pool].idle_per_node
    largest_idle = max(idle_per_node)
    paces: dict[tuple[int, bool], _Pace | None] = {}
    able: list[tuple[PendingRequest, RoundRequest, _Pace]] = []
    for pending in waiting:
        key = (tick.kinds[pending.spec.request_id], pending.encoded)
        if key not in paces:
            paces[key] = _find_pace(tick.find_batch_candidates([pending], pool), largest_idle)
        if (pace := paces[key]) is not None:
            budget_s = pending.deadline_s - pace.decode_s - tick.now_s
            request = RoundRequest(count_steps_left(pending), pace.step_s, pace.fastest_s, budget_s, pace.encode_s)
            able.append((pending, request, pace))
    packed = pack_round([request for _, request, _ in able], sum(idle_per_node), round_s)
    return [
        _Chosen(pending, request, pace.candidates, option.degree)
        for (pending, request, pace), option in zip(able, packed, strict=True)
        if option is not None
    ]


def _find_pace(candidates: Mapping[int, BatchCandidate], largest_idle: int) -> _Pace | None:
    """The pace at the degrees that idle workers could form now, up to `largest_idle`; None where there is none."""
    step_s = {degree: candidate.step_s for degree, candidate in candidates.items() if degree <= largest_idle}
    if not step_s:
        return None
    any_candidate = next(iter(candidates.values()))
    return _Pace(
        candidates,
        step_s,
        fastest_s=min(candidate.step_s for candidate in candidates.values()),
        encode_s=any_candidate.encode_wait_s + any_candidate.encode.seconds,
        decode_s=any_candidate.decode.seconds,
    )


def _scale_up(chosen: Sequence[_Chosen], idle_per_node: Sequence[int]) -> None:
    """Work-conserving elastic scale-up (4.2.3): while workers are left, the request whose step gets shorter by the
    largest factor goes to its next degree. Degrees are powers of two, so sets fit the nodes exactly when, for every
    degree, those at least as wide take no more than the nodes have in blocks of it."""
    degrees = sorted({1, *(degree for each in chosen for degree in each.request.step_s)})
    capacity = {degree: degree * sum(idle // degree for idle in idle_per_node) for degree in degrees}
    used = Counter({degree: sum(each.degree for each in chosen if each.degree >= degree) for degree in capacity})
    growing = list(chosen)
    while growing and used[1] < capacity[1]:
        gains: list[tuple[float, int, int]] = []
        for number, each in enumerate(growing):
            wider = [degree for degree in each.request.step_s if degree > each.degree]
            if wider and (ratio := each.request.step_s[min(wider)] / each.request.step_s[each.degree]) < 1:
                gains.append((ratio, number, min(wider)))
        grown: list[_Chosen] = []
        for _, number, degree in sorted(gains):
            each = growing[number]
            after = {k: used[k] + degree - each.degree * (k <= each.degree) for k in capacity if k <= degree}
            if all(after[k] <= capacity[k] for k in after):
                used.update({k: after[k] - used[k] for k in after})
                each.degree = degree
                grown.append(each)
        growing = grown


def _build_segment(
    tick: StepTick,
    pool: int,
    each: _Chosen,
    company: Sequence[PendingRequest],
    workers: tuple[WorkerId, ...],
    round_s: float,
) -> Assignment:
    """The steps of the round, at least one where any are left. `company`: those that share them."""
    members = [each.pending, *company]
    candidate = tick.find_batch_candidates(members, pool)[each.degree] if company else each.candidates[each.degree]
    encode_s = candidate.encode_wait_s + candidate.encode.seconds
    pace = each.request._replace(step_s={each.degree: candidate.step_s}, encode_s=encode_s)
    steps = count_steps_in_round(pace, each.degree, round_s)
    slack_s = each.pending.deadline_s - tick.expected_finish_s(each.pending, candidate)
    reason = (
        f"tetriserve: {steps} step{'s' * (steps != 1)} at degree {each.degree}, {slack_s:.2f} s of slack at that degree"
    )
    if company:
        reason += f" in a batch of {len(members)}"
    return tick.build_assignment(members, candidate, workers, reason, steps)
