"""The Replanner: watches the load through the Monitor and proposes another placement when the current one no longer
fits (TridentServe, arXiv 2510.02838, sections 5.3 and 6.1). Pure: time is an argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pydantic import Field, ValidationInfo, field_validator

from placement.demands import ClusterCosts, compute_stage_speeds
from placement.orchestrator import Orchestrator
from placement.transition import align
from profiler.monitor import (
    DEFAULT_MIN_ARRIVALS,
    DEFAULT_MIN_REQUESTS,
    DEFAULT_WINDOW_S,
    Monitor,
    SkewTrigger,
    StageSpeed,
    compute_skew,
)
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError
from tridentserve.load import LoadShare
from tridentserve.options import options
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.protocols import StageReport, StageTimes
from tridentserve.requests import RequestSpec, Shape


@options
class ReplanOptions:
    """The options that decide when the placement follows the load."""

    window_s: float = Field(
        default=DEFAULT_WINDOW_S,
        gt=0,
        description="Length of the sliding window over which arrivals and finished stages are counted, in seconds (the "
        "paper's T), for models without a `window_s` of their own.",
    )
    min_requests: int = Field(
        default=DEFAULT_MIN_REQUESTS,
        ge=1,
        description="Fewest finished requests in the window with which a measured rate counts.",
    )
    min_arrivals: int = Field(
        default=DEFAULT_MIN_ARRIVALS,
        ge=0,
        description="Number of arrivals in the window below which it reaches further back, up to five times as far.",
    )
    trigger_ratio: float = Field(
        default=1.5,
        ge=1,
        description="Speed of the fastest stage over that of the slowest, each relative to its work, from which on a "
        "new placement is planned.",
    )
    release_ratio: float = Field(
        default=1.2,
        ge=1,
        description="Ratio of these speeds below which the imbalance is over; it is not above `trigger_ratio`.",
    )
    hold_s: float = Field(default=5, ge=0, description="How long the imbalance must last, in seconds.")
    min_interval_s: float = Field(
        default=30,
        ge=0,
        description="Shortest time from any planning, also one that was declined, to the next one for the load, in "
        "seconds. Placements for workers that are lost or come back do not wait for it.",
    )
    check_interval_s: float = Field(default=1, ge=0, description="Time between two looks at the window, in seconds.")
    min_gain: float = Field(
        default=0.15, ge=0, description="How much faster the slowest stage must get, as a share (0.15 is 15 %)."
    )
    noise_factor: float = Field(
        default=2,
        ge=0,
        description="Number of standard errors of the window's load that the gain must exceed.",
    )
    min_pressure: float = Field(
        default=0.3,
        ge=0,
        description="Work per worker of the slowest stage below which nothing is changed: an idle system has no bad "
        "placement.",
    )
    settle_s: float = Field(
        default=2,
        ge=0,
        description="How long workers must have stayed the same after one was lost or came back, in seconds.",
    )

    @field_validator("release_ratio")
    @classmethod
    def _not_above_the_trigger(cls, release: float, info: ValidationInfo) -> float:
        if release > (trigger := info.data.get("trigger_ratio", math.inf)):
            raise ValueError(f"not above trigger_ratio ({trigger:g})")
        return release


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
        self._monitor = Monitor(windows_s, o.window_s, o.min_requests, o.min_arrivals)
        self._trigger = SkewTrigger(o.trigger_ratio, o.release_ratio, o.hold_s, o.min_interval_s)
        self._largest: dict[tuple[str, int], LoadShare] = {}
        self._next_check_s = -math.inf
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
        load = self._measure_load(now_s) or list(self._expected)
        lost, new = len((placement.replicas.keys() & self._seen) - alive), len(alive - placement.replicas.keys())
        try:
            plan = self._plan(load, workers, placement, now_s)
        except ConfigError as error:
            return self._decline(f"{lost} workers lost, {new} new; no plan for those that there are: {error}")
        self._trigger.rest(now_s)
        return self._accept(plan, f"{lost} workers lost, {new} new")

    def _propose_for_load(
        self, workers: Sequence[WorkerSpec], placement: PlacementPlan, now_s: float
    ) -> PlacementPlan | None:
        """A plan for the load in the window, if stages are out of balance and it is worth its cost."""
        o, costs = self._options, self._costs
        load = self._measure_load(now_s)
        if not load or costs is None:
            return self._decline("nothing arrives")
        try:
            now = compute_stage_speeds(placement, load, costs)
        except ConfigError as error:
            return self._decline(str(error))
        found, pressure = compute_skew(now.values()), _compute_pressure(now.values())
        # An idle system is in balance: a skew does not begin before there is work, and ends with it.
        due = self._trigger.update(found if pressure >= o.min_pressure else 1.0, now_s)
        state = f"fastest over slowest stage {found:.2f}, slowest has work for {pressure:.2f} of its workers"
        if not due:
            return self._decline(state)
        try:
            plan = self._plan(load, workers, placement, now_s)
        except ConfigError as error:
            return self._decline(f"{state}; no other plan: {error}")
        gain = pressure / _compute_pressure(compute_stage_speeds(plan, load, costs).values()) - 1
        noise = self._estimate_noise(now, now_s)
        if gain < max(o.min_gain, noise):
            return self._decline(f"{state}; another plan gains {gain:.0%}, chance alone {noise:.0%}")
        cost_s = self._sum_loading_gpu_seconds(plan, placement)
        if cost_s >= o.min_interval_s * len(workers) * (1 - 1 / (1 + gain)):
            return self._decline(f"{state}; another plan gains {gain:.0%} and takes {cost_s:.0f} GPU-seconds to load")
        return self._accept(plan, f"{state}; this gains {gain:.0%}")

    def _plan(
        self, load: Sequence[LoadShare], workers: Sequence[WorkerSpec], placement: PlacementPlan, now_s: float
    ) -> PlacementPlan:
        """The Orchestrator's plan, its parts given to the workers that have most of them already."""
        keep = [*self._expected, *self._largest.values()]
        plan = self._orchestrator.plan(load, workers, placement.epoch + 1, keep, self._monitor.measure_rates(now_s))
        return align(plan, placement, workers, self._times)

    def _measure_load(self, now_s: float) -> list[LoadShare]:
        return [
            LoadShare(kind.model, kind.shape, kind.num_inference_steps, per_s)
            for kind, per_s in self._monitor.measure_load(now_s).items()
        ]

    def _estimate_noise(self, speeds: Mapping[frozenset[Replica], StageSpeed], now_s: float) -> float:
        """The error that the work of the slowest stage may have by chance, relative to it."""
        replicas, slowest = min(speeds.items(), key=lambda item: (item[1].speed, sorted(item[0])))
        window_s = min(self._monitor.choose_load_window_s(replica.model, now_s) for replica in replicas)
        return self._options.noise_factor * slowest.compute_relative_error(window_s)

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


def _find_octave(shape: Shape) -> int:
    return round(math.log2(shape.tokens))
