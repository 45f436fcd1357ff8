"""The Replanner: watches the load through the Monitor and proposes another placement when the current one no longer
fits (TridentServe, arXiv 2510.02838, sections 5.3 and 6.1). Pure: time is an argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import Field

from placement.demands import ClusterCosts, MeasuredRates, compute_stage_speeds
from placement.orchestrator import Orchestrator
from placement.transition import align
from profiler.monitor import (
    DEFAULT_MIN_REQUESTS,
    DEFAULT_SHORTEST_WINDOW_S,
    DEFAULT_WINDOW_S,
    Monitor,
    StageSpeed,
    WorkKind,
    compute_skew,
)
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError
from tridentserve.load import LoadShare
from tridentserve.options import options
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.protocols import StageReport, StageTimes
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import Stage


@options
class ReplanOptions:
    """The options that decide when the placement follows the load."""

    window_s: float = Field(
        default=DEFAULT_WINDOW_S,
        gt=0,
        description="Longest time over which arrivals and finished stages are counted, in seconds (the paper's T), for "
        "models without a `window_s` of their own. The load is measured over as much of it as has not changed.",
    )
    shortest_window_s: float = Field(
        default=DEFAULT_SHORTEST_WINDOW_S,
        gt=0,
        description="The window is halved while its older half brought other work than its newer one, but not below "
        "this many seconds.",
    )
    min_requests: int = Field(
        default=DEFAULT_MIN_REQUESTS,
        ge=1,
        description="Fewest finished requests in the window with which a measured rate counts.",
    )
    trigger_ratio: float = Field(
        default=1.5,
        ge=1,
        description="Speed of the fastest stage over that of the slowest, each relative to its work and less what "
        "chance explains, from which on a new placement is planned.",
    )
    check_interval_s: float = Field(default=1, ge=0, description="Time between two looks at the window, in seconds.")
    settle_s: float = Field(
        default=2,
        ge=0,
        description="Time for which workers must have stayed the same after one was lost or came back, in seconds.",
    )


# The standard errors by which measured work is taken to be less than it seems, where that speaks against a switch.
_CAUTION = 2.0
# A plan that was declined is made again when the window has moved by this share of it.
_RETRY_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class _Seen:
    """The load as it will be when weights have been loaded, the time over which it was seen, and measured rates."""

    load: Sequence[LoadShare] = ()
    window_s: float = math.inf
    rates: MeasuredRates = field(default_factory=dict)


class MonitoredReplanner:
    """The protocol `tridentserve.protocols.Replanner`. `verdict` says what the last look at the load came to."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        times: StageTimes,
        expected: Sequence[LoadShare],
        options: ReplanOptions | None = None,
        windows_s: Mapping[str, float] | None = None,
    ) -> None:
        """`expected`: the load that the first placement was made for. Its sizes stay servable, and it stands
        in for the window when workers come or go while next to nothing arrives. `windows_s`: the models whose window is
        not that of the options."""
        self._orchestrator = orchestrator
        self._times = times
        self._expected = tuple(expected)
        self._options = options or ReplanOptions()
        o = self._options
        self._monitor = Monitor(windows_s, o.window_s, o.shortest_window_s, o.min_requests)
        self._largest: dict[tuple[str, int], LoadShare] = {}
        self._next_check_s = self._next_plan_s = -math.inf
        self._workers: Sequence[WorkerSpec] = ()
        self._placement: PlacementPlan | None = None
        self._costs: ClusterCosts | None = None
        self._seen: set[WorkerId] = set()
        self._changed_s = -math.inf
        self._tried: frozenset[WorkerId] = frozenset()
        self.verdict = "nothing has been looked at yet"

    def arrived(self, spec: RequestSpec, now_s: float) -> None:
        """A request was accepted. It may wait for longer than the window is: its size is kept in mind."""
        self._monitor.arrived(spec, now_s)
        # What runs the largest size of an octave runs all of it: memory grows with tokens.
        key = (spec.model, _find_octave(spec.shape))
        known = self._largest.get(key)
        if known is None or spec.shape.tokens > known.shape.tokens:
            self._largest[key] = LoadShare(spec.model, spec.shape, spec.num_inference_steps)

    def stage_finished(self, report: StageReport) -> None:
        """A stage has run, at `report.span.end_s`."""
        self._monitor.stage_finished(report)

    def expect(self, model: str, load: Sequence[LoadShare], window_s: float | None) -> None:
        """A model is served from now on: see `Replanner`."""
        self._expected = (*(share for share in self._expected if share.model != model), *load)
        self._monitor.set_window(model, window_s)
        self._tried = frozenset()  # its placement may name workers that are lost

    def forget(self, model: str) -> None:
        """A model is not served any more: nothing is planned for it."""
        self._expected = tuple(share for share in self._expected if share.model != model)
        self._largest = {key: share for key, share in self._largest.items() if key[0] != model}
        self._monitor.drop(model)
        self._tried = frozenset()

    def propose(self, workers: Sequence[WorkerSpec], placement: PlacementPlan, now_s: float) -> PlacementPlan | None:
        """A better plan for the live workers, or None; `verdict` says why. Between two looks it costs nothing."""
        if workers is self._workers and now_s < self._next_check_s:
            return None
        if workers is not self._workers:
            self._follow_workers(workers, now_s)
        if now_s < self._next_check_s:
            return None
        self._next_check_s = now_s + self._options.check_interval_s
        if not workers:
            return self._decline("there are no workers")
        alive = frozenset(worker.worker_id for worker in workers)
        stray = alive ^ (placement.replicas.keys() & self._seen)
        if stray and alive != self._tried:
            return self._propose_for_workers(workers, placement, alive, now_s)
        return self._propose_for_load(workers, placement, now_s)

    def _follow_workers(self, workers: Sequence[WorkerSpec], now_s: float) -> None:
        alive = {worker.worker_id for worker in workers}
        if alive != {worker.worker_id for worker in self._workers}:
            self._changed_s = now_s
            self._seen |= alive
            self._tried = frozenset()
            self._costs = self._orchestrator.build_costs(workers) if workers else None
        self._workers = workers

    def _propose_for_workers(
        self, workers: Sequence[WorkerSpec], placement: PlacementPlan, alive: frozenset[WorkerId], now_s: float
    ) -> PlacementPlan | None:
        """A plan for other workers than the placement has: without asking what it gains."""
        if now_s - self._changed_s < self._options.settle_s:
            return self._decline("workers came or went a moment ago")
        self._tried = alive
        lost, new = len((placement.replicas.keys() & self._seen) - alive), len(alive - placement.replicas.keys())
        try:
            seen = self._measure(now_s)
            plan = self._plan(seen if seen.load else _Seen(self._expected), workers, placement)
        except ConfigError as error:
            return self._decline(f"{lost} workers lost, {new} new; no plan for those that there are: {error}")
        return self._accept(plan, f"{lost} workers lost, {new} new")

    def _propose_for_load(
        self, workers: Sequence[WorkerSpec], placement: PlacementPlan, now_s: float
    ) -> PlacementPlan | None:
        """A plan for the load that is seen, if stages are out of balance and it is worth its cost."""
        costs = self._costs
        try:
            seen = self._measure(now_s)
            if not seen.load or costs is None:
                return self._decline("nothing arrives")
            now = compute_stage_speeds(placement, seen.load, costs)
        except ConfigError as error:
            return self._decline(str(error))
        skew = compute_skew(now.values(), seen.window_s, _CAUTION)
        state = (
            f"fastest over slowest stage {compute_skew(now.values()):.2f} ({skew:.2f} without chance), slowest has "
            f"work for {_compute_pressure(now.values()):.2f} of its workers, seen for {seen.window_s:.0f} s"
        )
        lack = _compute_lack(now, seen.window_s)
        if skew < self._options.trigger_ratio or lack == 0 or now_s < self._next_plan_s:
            return self._decline(state)
        self._next_plan_s = now_s + _RETRY_SHARE * seen.window_s
        try:
            plan = self._plan(seen, workers, placement)
            then = compute_stage_speeds(plan, seen.load, costs)
        except ConfigError as error:
            return self._decline(f"{state}; no other plan: {error}")
        # The load may be expected to last as long again as it has been seen. A switch for chance alone is undone, so
        # that the way back counts too.
        gain_s = (lack - _compute_lack(then, seen.window_s)) * seen.window_s
        cost_s = self._sum_loading_gpu_seconds(plan, placement) + self._sum_loading_gpu_seconds(placement, plan)
        if gain_s <= cost_s:
            return self._decline(f"{state}; another plan gains {gain_s:.0f} GPU-seconds, moving takes {cost_s:.0f}")
        self._next_plan_s = -math.inf
        return self._accept(plan, f"{state}; this gains {gain_s:.0f} GPU-seconds, moving takes {cost_s:.0f}")

    def _plan(self, seen: _Seen, workers: Sequence[WorkerSpec], placement: PlacementPlan) -> PlacementPlan:
        """The Orchestrator's plan, its parts given to the workers that have most of them already."""
        keep = [*self._expected, *self._largest.values()]
        plan = self._orchestrator.plan(seen.load, workers, placement.epoch + 1, keep, seen.rates)
        return align(plan, placement, workers, self._times)

    def _measure(self, now_s: float) -> _Seen:
        """The load of all models. Measured rates are of requests that have been served, so they hold for the load only
        where that has not changed; else the profile's count, which follows the measured times too."""
        measured = self._monitor.measure_load(now_s, self._weigh)
        load = [
            LoadShare(kind.model, kind.shape, kind.num_inference_steps, per_s)
            for model, of_model in measured.items()
            for kind, per_s in of_model.expect(self._find_slowest_load_s(model)).items()
        ]
        rates = {
            kind: rate
            for kind, rate in self._monitor.measure_rates(now_s).items()
            if kind[0] in measured and measured[kind[0]].is_steady
        }
        return _Seen(load, min((of_model.window_s for of_model in measured.values()), default=math.inf), rates)

    def _weigh(self, kind: WorkKind) -> Mapping[Stage, float]:
        assert self._costs is not None  # there are workers
        share = LoadShare(kind.model, kind.shape, kind.num_inference_steps)
        fit = self._costs.fit(kind.model, self._costs.choose_first_replica(kind.model, kind.shape), kind.shape)
        assert fit is not None  # it was chosen because it fits
        return {stage: self._costs.compute_gpu_seconds(share, fit, (stage,)) for stage in Stage}

    def _find_slowest_load_s(self, model: str) -> float:
        return max(self._times.load_seconds(model, stage) for stage in Stage)

    def _sum_loading_gpu_seconds(self, plan: PlacementPlan, placement: PlacementPlan) -> float:
        return sum(
            self._times.load_seconds(replica.model, replica.stage)
            for worker_id, held in plan.replicas.items()
            for replica in held - placement.replicas.get(worker_id, frozenset())
        )

    def _accept(self, plan: PlacementPlan, why: str) -> PlacementPlan:
        self.verdict = why
        return replace(plan, reason=f"{why}; {plan.reason}")

    def _decline(self, why: str) -> PlacementPlan | None:
        self.verdict = why
        return None


def _compute_pressure(speeds: Iterable[StageSpeed]) -> float:
    """GPU-seconds per second and worker of the slowest stage: above 1, its queue grows."""
    return max(1 / stage.speed for stage in speeds)


def _compute_lack(speeds: Mapping[frozenset[Replica], StageSpeed], window_s: float) -> float:
    """GPU-seconds per second of the requests that arrive and are not served, at the cautious end of the work that was
    seen for `window_s`: all stages of a model wait for its slowest one."""
    cautious = {held: stage.shift(window_s, -_CAUTION) for held, stage in speeds.items()}
    slowest: dict[str, float] = {}
    for held, stage in cautious.items():
        for model in {replica.model for replica in held}:
            slowest[model] = min(slowest.get(model, 1.0), stage.speed)
    return sum(
        stage.work * (1 - min((slowest[replica.model] for replica in held), default=1.0))
        for held, stage in cautious.items()
    )


def _find_octave(shape: Shape) -> int:
    return round(math.log2(shape.tokens))
