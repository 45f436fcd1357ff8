"""Predicts when requests will have ended, and keeps the record of how good its predictions were. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tridentserve.protocols import PendingRequest, StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.ledger import Ledger
from tridentserve.scheduling.prediction.costs import RequestCosts, name_kind
from tridentserve.scheduling.prediction.crowd import RequestCrowd
from tridentserve.scheduling.prediction.degrees import Way, expect_first_way, find_asked_efficiency, list_ways
from tridentserve.scheduling.prediction.experience import REHEARSED, Crowding, Experience
from tridentserve.scheduling.prediction.rehearsal import Rehearsal
from tridentserve.scheduling.prediction.scene import SharingRules
from tridentserve.scheduling.prediction.scene_builder import CostBook, ExpectedArrival, SceneBuilder
from tridentserve.scheduling.runs import Request
from tridentserve.scheduling.workers.worker_pool import WorkerPool

# The latest arrivals stand for those to come; with fewer than this there is nothing to go by.
_MOST_KNOWN, _FEWEST_KNOWN = 200, 10
# On so many workers the whole is rehearsed. On more of them a rehearsal takes too long, and requests hardly wait for
# each other: what one takes alone and the crowd tell as much.
_MOST_REHEARSED = 16
# No prediction is below this.
_LEAST_S = 0.001


@dataclass(frozen=True, slots=True)
class Quote:
    """The prediction for one request."""

    seconds: float
    """Seconds from its arrival to its end."""
    slo_s: float
    """Seconds from its arrival to its deadline."""
    is_guess: bool
    """True where no request of this kind has ended yet, or where the rehearsal was cut short."""
    estimated_s: float
    """Seconds from when the scheduler got it to its end, before experience corrects them."""
    crowding: Crowding
    """The crowd that it comes into."""
    degree: int = REHEARSED
    """The degree at which D was estimated to begin; `REHEARSED` where all of it was rehearsed."""

    @property
    def is_late(self) -> bool:
        """True when it is predicted to end after its deadline."""
        return self.seconds > self.slo_s

    def describe(self) -> str:
        """A sentence about a request that is late."""
        guess = ", as far as the profile alone tells" if self.is_guess else ""
        after = f"{self.seconds - self.slo_s:.2f} s after its deadline"
        return f"it is predicted to end {self.seconds:.2f} s after its arrival{guess}, {after}"


@dataclass(frozen=True, slots=True)
class RequestOutlook:
    """The prospect of a request that has not ended."""

    queue_position: int
    """Number of requests that wait for a dispatch and go before it, by deadline; 0 once it runs."""
    finish_s: float


@dataclass(slots=True)
class _OpenPrediction:
    """A prediction whose request has not ended."""

    spec: RequestSpec
    quote: Quote
    is_typical: bool = True
    """Nothing has gone wrong with it so far."""


class Predictor:
    """Quotes requests that come, and tells the prospects of those that are there.

    A prediction is a rehearsal (`rehearsal`), or on many workers what the request takes alone and what waits before it
    (`crowd`), and is corrected by how long requests of the kind took beside theirs in such a crowd (`experience`). Only
    what the scheduler tells changes what it knows, so that a replayed log gives the same.
    """

    def __init__(
        self, ledger: Ledger, pool: WorkerPool, times: StageTimes, rules: SharingRules, period_s: float | None
    ) -> None:
        """`period_s`: see `SchedulerOptions.predict_every_s`."""
        self._ledger = ledger
        self._pool = pool
        self._times = times
        self._rules = rules
        self._period_s = period_s
        self._experience = Experience()
        self._arrivals: deque[tuple[float, RequestSpec, float]] = deque(maxlen=_MOST_KNOWN)
        self._noted_s = -math.inf
        # Costs are found apart for decisions and for questions: what is asked must not change what is decided.
        self._book = CostBook(times, rules)
        self._open: dict[str, _OpenPrediction] = {}

    def quote(self, spec: RequestSpec, slo_s: float, now_s: float, book: CostBook | None = None) -> Quote | None:
        """The prediction for a request that came now; None where its costs are not known, or no worker could run it."""
        builder = self._make_builder(now_s, book)
        costs = builder.find_costs(spec)
        if costs is None or not builder.can_run(spec.model):
            return None
        request = PendingRequest(spec, now_s - spec.waited_s, now_s - spec.waited_s + slo_s)
        crowd, alone_s = RequestCrowd(self._ledger, builder, now_s), costs.alone_s(spec.num_inference_steps, True)
        end_s, is_cut_short, degree = None, False, REHEARSED
        if builder.num_workers <= _MOST_REHEARSED:
            rehearsal = self._rehearse(builder, [request], now_s)
            end_s, is_cut_short = rehearsal.ends_s.get(spec.request_id), rehearsal.is_cut_short
        if end_s is not None:
            estimated_s = end_s - now_s
        else:
            asked = find_asked_efficiency(self._measure_load(builder, now_s), self._rules.min_efficiency)
            way = self._expect_way(builder, costs, request, now_s, asked)
            estimated_s, degree = way.seconds + crowd.estimate_wait_s(spec, request.deadline_s), way.degree
        estimated_s, crowding, kind = max(_LEAST_S, estimated_s), crowd.measure(spec, alone_s), name_kind(spec)
        seconds = spec.waited_s + self._experience.correct(kind, degree, crowding, estimated_s)
        is_guess = is_cut_short or not self._experience.knows(kind)
        return Quote(seconds, slo_s, is_guess, estimated_s, crowding, degree)

    def list_outlooks(self, now_s: float) -> Mapping[str, RequestOutlook]:
        """The prospects of all requests that have not ended and whose costs are known."""
        builder = self._make_builder(now_s)
        ends_s: Mapping[str, float] = {}
        if builder.num_workers <= _MOST_REHEARSED:
            ends_s = self._rehearse(builder, [], now_s).ends_s
        crowd = RequestCrowd(self._ledger, builder, now_s)
        asked = find_asked_efficiency(self._measure_load(builder, now_s), self._rules.min_efficiency)
        in_order = sorted(self._ledger.pending.values(), key=lambda each: (each.deadline_s, each.spec.request_id))
        positions = {each.spec.request_id: position for position, each in enumerate(in_order)}
        outlooks: dict[str, RequestOutlook] = {}
        for name, request in self._ledger.requests.items():
            spec = request.spec
            if (costs := builder.find_costs(spec)) is None:
                continue
            degree = REHEARSED
            if name in ends_s:
                left_s = ends_s[name] - now_s
            elif (run := request.run) is not None:
                degree = max((k for k in costs.step_s if k <= len(run.assignment.diffuse)), default=min(costs.step_s))
                left_s = costs.take_s(degree, self._count_steps_left(request, now_s), not request.encoded)
            else:
                way = self._expect_way(builder, costs, request.make_view(), now_s, asked)
                left_s, degree = way.seconds + crowd.estimate_wait_s(spec, request.deadline_s), way.degree
            crowding = crowd.measure(spec, costs.alone_s(spec.num_inference_steps, True))
            left_s = self._experience.correct(name_kind(spec), degree, crowding, max(_LEAST_S, left_s))
            outlooks[name] = RequestOutlook(positions.get(name, 0), now_s + left_s)
        return outlooks

    def _expect_way(
        self, builder: SceneBuilder, costs: RequestCosts, request: PendingRequest, now_s: float, asked: float
    ) -> Way:
        """The way in which a request that waits would run if it went on as it begins."""
        steps = request.spec.num_inference_steps - request.steps_done
        ways = list_ways(costs, steps, not request.encoded)
        left_s, idle = request.deadline_s - now_s, builder.find_widest_idle(request.spec.model)
        return expect_first_way(ways, costs.optimal, left_s, self._rules.spare, asked, idle)

    @staticmethod
    def _count_steps_left(request: Request, now_s: float) -> float:
        if (run := request.run) is None or run.step_s <= 0:
            return request.steps_left
        return max(0.0, request.steps_left - run.num_steps + max(0.0, (run.diffuse_end_s - now_s) / run.step_s))

    def _make_builder(self, now_s: float, book: CostBook | None = None) -> SceneBuilder:
        return SceneBuilder(self._ledger, self._pool, book or CostBook(self._times, self._rules), now_s)

    # What the scheduler tells.

    def predict_arrival(self, spec: RequestSpec, slo_s: float, now_s: float) -> Quote | None:
        """The prediction for a request that has arrived, if one is due or the request depends on it."""
        is_due = self._period_s is not None and now_s >= self._noted_s + self._period_s
        if not is_due and spec.on_late == "wait":
            return None
        self._noted_s = now_s
        return self.quote(spec, slo_s, now_s, self._book)

    def note_arrival(self, spec: RequestSpec, slo_s: float, now_s: float, quote: Quote | None) -> None:
        """A request was accepted, with this prediction."""
        self._arrivals.append((now_s, spec, max(0.0, slo_s - spec.waited_s)))
        if quote is not None:
            self._open[spec.request_id] = _OpenPrediction(spec, quote)

    def follow(self, effects: list[ev.Effect]) -> list[ev.Effect]:
        """The effects of an event, each `Finish` with what was predicted for its request."""
        if not self._open or not effects:
            return effects
        return [self._follow(effect) for effect in effects]

    def _follow(self, effect: ev.Effect) -> ev.Effect:
        match effect:
            case ev.Finish():
                known = self._open.pop(effect.request_id, None)
                if known is None:
                    return effect
                if known.is_typical:
                    actual_s = effect.latency_s - known.spec.waited_s
                    quote = known.quote
                    self._experience.note(
                        name_kind(known.spec), quote.degree, quote.crowding, quote.estimated_s, actual_s
                    )
                return replace(effect, predicted_s=known.quote.seconds)
            case ev.Reject():
                self._open.pop(effect.request_id, None)
            case ev.Requeue():
                if (known := self._open.get(effect.request_id)) is not None:
                    known.is_typical = False  # a request that is tried again teaches nothing
            case _:
                pass
        return effect

    # Rehearsals.

    def _rehearse(self, builder: SceneBuilder, targets: Sequence[PendingRequest], now_s: float) -> Rehearsal:
        load = self._measure_load(builder, now_s)
        rehearsal = builder.build(targets, self._expect_arrivals(now_s), load, self._rules)
        rehearsal.run([target.spec.request_id for target in targets] or list(self._ledger.requests))
        return rehearsal

    def _expect_arrivals(self, now_s: float) -> Iterator[ExpectedArrival]:
        """The latest arrivals once more, the first of them first."""
        if len(self._arrivals) < _FEWEST_KNOWN:
            return
        first_s = self._arrivals[0][0]
        for number, (arrival_s, spec, patience_s) in enumerate(self._arrivals):
            yield ExpectedArrival(f"expected {number}", spec, now_s + arrival_s - first_s, patience_s)

    def _measure_load(self, builder: SceneBuilder, now_s: float) -> float:
        """The worker-seconds that the latest arrivals need over those that there were since the first of them."""
        if len(self._arrivals) < _FEWEST_KNOWN:
            return 0.0
        needed_s = 0.0
        costs: dict[object, float] = {}
        for _, spec, _ in self._arrivals:
            kind = name_kind(spec)
            if kind not in costs:
                costs[kind] = _least_gpu_seconds(builder.find_costs(spec), spec)
            needed_s += costs[kind]
        return needed_s / (max(1e-3, now_s - self._arrivals[0][0]) * max(1, builder.num_workers))


def _least_gpu_seconds(costs: RequestCosts | None, spec: RequestSpec) -> float:
    return costs.least_gpu_seconds(spec.num_inference_steps, True) if costs is not None else 0.0
