"""Predicts when requests will have ended, and keeps the record of how good its predictions were. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tridentserve.errors import ProfileError
from tridentserve.protocols import PendingRequest, StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.prediction.costs import RequestCosts, name_kind
from tridentserve.scheduling.prediction.crowd import RequestCrowd
from tridentserve.scheduling.prediction.degrees import find_asked_efficiency
from tridentserve.scheduling.prediction.experience import Estimate, Experience
from tridentserve.scheduling.prediction.rehearsal import Rehearsal
from tridentserve.scheduling.prediction.scene import SharingRules
from tridentserve.scheduling.prediction.scene_builder import CostBook, SceneBuilder
from tridentserve.scheduling.prediction.usual_times import UsualTimes
from tridentserve.scheduling.runs.ledger import Ledger
from tridentserve.scheduling.workers.worker_pool import WorkerPool

# The latest arrivals tell the load; with fewer than this there is nothing to go by.
_MOST_KNOWN, _FEWEST_KNOWN = 200, 10
# On so many workers the whole is rehearsed. On more of them a rehearsal takes too long, and requests hardly wait for
# each other: what one takes at the degree at which it can begin, and the crowd, tell as much.
_MOST_REHEARSED = 16


@dataclass(frozen=True, slots=True)
class Quote:
    """The prediction for one request."""

    seconds: float
    """Seconds from its arrival to its end."""
    slo_s: float
    """Seconds from its arrival to its deadline."""
    is_guess: bool
    """True where no request of this kind has ended yet, or where the rehearsal was cut short."""
    estimate: Estimate
    """That which experience has corrected."""
    alone_s: float = 0.0
    """Seconds that the request was expected to take alone; 0 where it is not known."""
    widest: int = 1
    """The most workers of its model that one node had."""

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

    A prediction is a rehearsal (`rehearsal`), or on many workers what the request takes at the degree at which it can
    begin and what waits before it (`crowd`). It is corrected by how long requests of the kind took beside theirs
    (`experience`), and mixed with how long they usually took (`usual_times`). Only what the scheduler tells changes
    what it knows, so that a replayed log gives the same.
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
        self._usual_times = UsualTimes()
        self._arrivals: deque[tuple[float, RequestSpec]] = deque(maxlen=_MOST_KNOWN)
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
        estimate, is_cut_short = None, False
        if builder.num_workers <= _MOST_REHEARSED:
            rehearsal = self._rehearse(builder, [request], now_s)
            estimate, is_cut_short = rehearsal.estimate(spec.request_id), rehearsal.is_cut_short
        if estimate is None:
            estimate = self._look_around(builder, now_s).estimate_waiting(request, costs)
        kind = name_kind(spec)
        alone_s = costs.alone_s(spec.num_inference_steps, True)
        corrected_s = self._usual_times.mix(kind, self._experience.correct(kind, estimate), alone_s)
        is_guess = is_cut_short or not self._experience.knows(kind)
        widest = builder.find_widest(spec.model)
        return Quote(spec.waited_s + corrected_s, slo_s, is_guess, estimate, alone_s, widest)

    def list_outlooks(self, now_s: float) -> Mapping[str, RequestOutlook]:
        """The prospects of all requests that have not ended and whose costs are known."""
        builder = self._make_builder(now_s)
        rehearsal: Rehearsal | None = None
        if builder.num_workers <= _MOST_REHEARSED:
            rehearsal = self._rehearse(builder, [], now_s)
        crowd = self._look_around(builder, now_s)
        in_order = sorted(self._ledger.pending.values(), key=lambda each: (each.deadline_s, each.spec.request_id))
        positions = {each.spec.request_id: position for position, each in enumerate(in_order)}
        outlooks: dict[str, RequestOutlook] = {}
        for name, request in self._ledger.requests.items():
            if (costs := builder.find_costs(request.spec)) is None:
                continue
            estimate = rehearsal.estimate(name) if rehearsal is not None else None
            if estimate is None:
                estimate = crowd.estimate(request, costs)
            left_s = self._experience.correct(name_kind(request.spec), estimate)
            outlooks[name] = RequestOutlook(positions.get(name, 0), now_s + left_s)
        return outlooks

    def _look_around(self, builder: SceneBuilder, now_s: float) -> RequestCrowd:
        asked = find_asked_efficiency(self._measure_load(builder, now_s), self._rules.min_efficiency)
        return RequestCrowd(self._ledger, builder, now_s, self._rules.spare, asked)

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

    def note_arrival(self, spec: RequestSpec, now_s: float, quote: Quote | None) -> None:
        """A request was accepted, with this prediction."""
        self._arrivals.append((now_s, spec))
        if quote is not None:
            self._open[spec.request_id] = _OpenPrediction(spec, quote)

    def follow(self, effects: list[ev.Effect], now_s: float) -> list[ev.Effect]:
        """The effects of an event, each `Finish` with what was predicted for its request."""
        if not self._open or not effects:
            return effects
        return [self._follow(effect, now_s) for effect in effects]

    def _follow(self, effect: ev.Effect, now_s: float) -> ev.Effect:
        match effect:
            case ev.Finish():
                known = self._open.pop(effect.request_id, None)
                if known is None:
                    return effect
                if known.is_typical:
                    self._learn(known, effect.latency_s - known.spec.waited_s, now_s)
                return replace(effect, predicted_s=known.quote.seconds)
            case ev.Reject():
                self._open.pop(effect.request_id, None)
            case ev.Requeue():
                if (known := self._open.get(effect.request_id)) is not None:
                    known.is_typical = False  # a request that is tried again teaches nothing
            case _:
                pass
        return effect

    def _learn(self, known: _OpenPrediction, actual_s: float, now_s: float) -> None:
        """Learn from a request that has ended."""
        kind, alone_s = name_kind(known.spec), self._find_alone_s(known, now_s)
        estimate, alone_then_s = known.quote.estimate, known.quote.alone_s
        if min(alone_s, alone_then_s) > 0:
            estimate = estimate.scale(alone_s / alone_then_s)
        self._usual_times.note(kind, self._experience.correct(kind, estimate), alone_s, actual_s)
        self._experience.note(kind, estimate, actual_s)

    def _find_alone_s(self, known: _OpenPrediction, now_s: float) -> float:
        """The seconds that a request would have taken alone, by what is known now of the times of stages: they are
        learned apart from what experience has to correct."""
        quote, spec = known.quote, known.spec
        self._book.start(now_s)
        try:
            return self._book.find(spec, quote.widest).alone_s(spec.num_inference_steps, True)
        except ProfileError:
            return quote.alone_s

    # Rehearsals.

    def _rehearse(self, builder: SceneBuilder, targets: Sequence[PendingRequest], now_s: float) -> Rehearsal:
        load = self._measure_load(builder, now_s)
        rehearsal = builder.build(targets, load, self._rules)
        rehearsal.run([target.spec.request_id for target in targets] or list(self._ledger.requests))
        return rehearsal

    def _measure_load(self, builder: SceneBuilder, now_s: float) -> float:
        """The worker-seconds that the latest arrivals need over those that there were since the first of them."""
        if len(self._arrivals) < _FEWEST_KNOWN:
            return 0.0
        needed_s = 0.0
        costs: dict[object, float] = {}
        for _, spec in self._arrivals:
            kind = name_kind(spec)
            if kind not in costs:
                costs[kind] = _least_gpu_seconds(builder.find_costs(spec), spec)
            needed_s += costs[kind]
        return needed_s / (max(1e-3, now_s - self._arrivals[0][0]) * max(1, builder.num_workers))


def _least_gpu_seconds(costs: RequestCosts | None, spec: RequestSpec) -> float:
    return costs.least_gpu_seconds(spec.num_inference_steps, True) if costs is not None else 0.0
