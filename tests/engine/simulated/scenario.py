"""Whole simulations with the real scheduler: a cluster, a trace, failures, changes of placement, all from one seed."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.engine.simulated.greedy import Alternating, Greedy
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated import (
    FailingWorker,
    SimulatedEngine,
    SimulationOptions,
    SimulationResult,
    WorkerFailure,
)
from tridentserve.plans import DispatchPlan, PlacementPlan
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.scheduler import Scheduler, SchedulerOptions
from tridentserve.testing import MODEL, FixedTimes, make_cluster

_PLACEMENTS = ("EDC DC E DC", "ED ED C D", "D E C D", "EDC EDC EDC EDC", "DC D E ED")
_SHAPES = (Shape(512, 512), Shape(1024, 1024))


@dataclass
class Scenario:
    """`seed` draws the trace, the placements and the failures; the rest says what happens and which policy runs."""

    seed: int
    policy: Greedy = field(default_factory=Greedy)
    num_nodes: int = 2
    num_requests: int = 30
    num_failures: int = 0
    num_failing: int = 0
    switch_every_s: float | None = None
    memory_bytes: int = 100
    solve_time: float = 0.0
    jitter: float = 0.1
    overhead_s: float = 0.0
    slowdown: tuple[float, ...] = ()
    checkpoint_s: float = 0.0
    num_cancelled: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.workers, self.placement = self._placement()
        self._plans = [self.placement, self._placement()[1], self._placement()[1]]

    def _placement(self) -> tuple[list[WorkerSpec], PlacementPlan]:
        """At least one worker holds D."""
        types = [self._random.choice(_PLACEMENTS).split() for _ in range(self.num_nodes)]
        return make_cluster(
            {f"n{node}/w{i}": kind for node, kinds in enumerate(types) for i, kind in enumerate(kinds)},
            self.memory_bytes,
        )

    def scheduler(self) -> Scheduler:
        replanner = Alternating(self._plans, self.switch_every_s) if self.switch_every_s else None
        options = SchedulerOptions(checkpoint_s=self.checkpoint_s)
        return Scheduler(self.workers, self.placement, FixedTimes(), self.policy, options, replanner)

    def run(self, decision_log: Path | None = None, wrapped: Watched | None = None) -> SimulationResult:
        options = SimulationOptions(
            solve_time=self.solve_time,
            jitter=self.jitter,
            seed=self.seed,
            plan_overhead_s=self.overhead_s,
            report_overhead_s=self.overhead_s,
            slowdown=self.slowdown,
            group_setup_s=0.1,
            handoff_capacity_bytes=16,
            group_bytes=0,
            failures=self._failures(),
            failing=self._failing(),
            keep_plans=True,
            decision_log=decision_log,
        )
        engine = SimulatedEngine(wrapped or self.scheduler(), self.workers, self.placement, FixedTimes(), options)
        result = engine.run(self.trace(), self._cancels())  # type: ignore[arg-type]
        self.left_in_buffers = engine._cell._handoff.kept
        return result

    def trace(self) -> list[tuple[float, RequestSpec]]:
        draw = random.Random(self.seed + 1)
        at_s = 0.0
        arrivals = []
        for i in range(self.num_requests):
            at_s += draw.expovariate(1.0)
            steps, outputs = draw.randint(1, 8), draw.choice((1, 1, 2))
            spec = RequestSpec(f"r{i}", MODEL, draw.choice(_SHAPES), steps, outputs, slo_s=draw.uniform(5.0, 60.0))
            arrivals.append((at_s, spec))
        return arrivals

    def _cancels(self) -> list[tuple[float, ev.RequestCancelled]]:
        """Requests of which nobody wants to know any more, some seconds after they have come."""
        draw = random.Random(self.seed + 4)
        trace = self.trace()
        return [
            (at_s + draw.uniform(0.0, 15.0), ev.RequestCancelled(spec.request_id))
            for at_s, spec in draw.choices(trace, k=self.num_cancelled)
        ]

    def _failures(self) -> tuple[WorkerFailure, ...]:
        draw = random.Random(self.seed + 2)
        return tuple(
            WorkerFailure(draw.uniform(0.0, 40.0), draw.choice(self.workers).worker_id, draw.uniform(1.0, 20.0))
            for _ in range(self.num_failures)
        )

    def _failing(self) -> tuple[FailingWorker, ...]:
        draw = random.Random(self.seed + 3)
        begins_s = [draw.uniform(0.0, 40.0) for _ in range(self.num_failing)]
        return tuple(
            FailingWorker(draw.choice(self.workers).worker_id, begin_s, begin_s + draw.uniform(1.0, 60.0))
            for begin_s in begins_s
        )


class Watched:
    """A scheduler that writes down its events, and the plans that it sends."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.events: list[ev.Event] = []
        self.plans: list[DispatchPlan] = []

    @property
    def num_pending(self) -> int:
        return self.scheduler.num_pending

    def on(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        self.events.append(event)
        effects = self.scheduler.on(event, now_s)
        self.plans += [effect.plan for effect in effects if isinstance(effect, ev.RunPlan)]
        return effects


def everything(seed: int) -> Scenario:
    """All that can happen, at once."""
    policy = Greedy(degree=2, batch=2, segment=3, preempts=True, joins=True, goes_on=True)
    return Scenario(
        seed,
        policy,
        num_failures=4,
        num_failing=2,
        switch_every_s=7.0,
        solve_time=0.02,
        memory_bytes=51,
        checkpoint_s=1.0,
    )


if __name__ == "__main__":
    everything(int(sys.argv[1])).run(Path(sys.argv[2]))
