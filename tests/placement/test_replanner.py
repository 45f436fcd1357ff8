"""The Replanner: follows the mix of requests, replaces lost workers, and leaves alone what fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import LoadShare, MonitoredReplanner, Orchestrator, ReplanOptions, align
from placement.demands import compute_stage_speeds
from tests.profiler.synthetic import DEGREES, MIB, SHAPES, cost_model
from tests.support.work import calls_in
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError, PlacementError
from tridentserve.plans import PlacementPlan, StageSpan
from tridentserve.protocols import Replanner, StageReport
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage

# EDC runs the small size; the large one needs DC + E (900 + 1536 MiB and the reserve).
MEMORY_BYTES = (900 + 1536 + 20) * MIB
SMALL, LARGE = SHAPES[0], SHAPES[2]
LIGHT = [LoadShare("one", SMALL, 20, 90.0), LoadShare("one", LARGE, 20, 1.0)]
HEAVY = [LoadShare("one", SMALL, 20, 10.0), LoadShare("one", LARGE, 20, 4.0)]
TIMES = cost_model()
TICK_S = 0.25


def cluster(nodes: int = 4, per_node: int = 8) -> list[WorkerSpec]:
    return [WorkerSpec(f"n{n}w{i}", f"n{n}", MEMORY_BYTES, "gpu") for n in range(nodes) for i in range(per_node)]


def orchestrator() -> Orchestrator:
    return Orchestrator(TIMES, 10 * MIB, DEGREES, one_pool=False)


class Service:
    """A scheduler's part: ticks, arrivals at even distances, and every plan that is proposed is put in force."""

    def __init__(
        self, load: Sequence[LoadShare], workers: list[WorkerSpec], options: ReplanOptions | None = None
    ) -> None:
        self.workers, self.now_s, self.requests = workers, 0.0, 0
        self.plan = orchestrator().plan(load, workers, keep=load)
        self.replanner = MonitoredReplanner(orchestrator(), TIMES, load, options)
        self.proposed: list[tuple[float, PlacementPlan, PlacementPlan]] = []

    def run(self, load: Sequence[LoadShare], seconds: float) -> None:
        due = [0.0] * len(load)
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            for index, share in enumerate(load):
                due[index] += share.weight * TICK_S
                while due[index] >= 1:
                    due[index] -= 1
                    self.arrive(share.shape)
            plan = self.replanner.propose(self.workers, self.plan, self.now_s)
            if plan is not None:
                self.proposed.append((self.now_s, self.plan, plan))
                self.plan = plan

    def arrive(self, shape: Shape, model: str = "one") -> None:
        self.requests += 1
        self.replanner.arrived(RequestSpec(f"r{self.requests}", model, shape, 20), self.now_s)

    def types(self, model: str = "one") -> Counter[PlacementType | None]:
        return Counter(self.plan.type_of(worker_id, model) for worker_id in self.plan.replicas)


def test_it_is_what_the_scheduler_asks_for() -> None:
    replanner: Replanner = MonitoredReplanner(orchestrator(), TIMES, LIGHT)
    assert replanner.propose(cluster(), PlacementPlan({}), 0.0) is None


def test_a_steady_load_changes_nothing() -> None:
    service = Service(LIGHT, cluster())
    service.run(LIGHT, 400)
    assert service.proposed == []


def test_a_shift_of_the_mix_is_followed_there_and_back() -> None:
    service = Service(LIGHT, cluster())
    before = service.types()
    service.run(LIGHT, 120)
    service.run(HEAVY, 240)
    assert service.proposed
    heavy = service.types()
    assert heavy[PlacementType.DC] > before[PlacementType.DC]
    service.run(LIGHT, 240)
    light = service.types()
    assert light[PlacementType.EDC] > heavy[PlacementType.EDC]
    # Each plan is the next epoch, says why, and fits its load better.
    assert [new.epoch for _, _, new in service.proposed] == list(range(1, len(service.proposed) + 1))
    assert all("fastest over slowest stage" in new.reason and "brings" in new.reason for _, _, new in service.proposed)
    assert len(service.proposed) <= 6
    for _, old, new in service.proposed:
        assert new.replicas != old.replicas
        assert align(new, old, service.workers, TIMES).replicas == new.replicas


def test_an_idle_or_young_system_is_left_alone() -> None:
    service = Service(LIGHT, cluster())
    service.run([], 100)
    assert service.replanner.verdict == "nothing arrives"
    service.run([LoadShare("one", LARGE, 20, 0.05)], 300)
    assert service.proposed == []
    assert "slowest has work for 0.0" in service.replanner.verdict


def test_sizes_that_were_accepted_stay_servable() -> None:
    service = Service(LIGHT, cluster())
    service.arrive(SMALL, "two")  # a model that the first placement did not expect
    service.run(LIGHT, 400)
    service.run(HEAVY, 400)
    assert service.proposed
    costs = orchestrator().build_costs(service.workers)
    for _, _, plan in service.proposed:
        compute_stage_speeds(plan, [*LIGHT, LoadShare("two", SMALL, 20)], costs)
    with pytest.raises(PlacementError, match="two at 1024x1024 cannot run"):
        compute_stage_speeds(orchestrator().plan(LIGHT, service.workers), [LoadShare("two", LARGE, 20)], costs)


def test_lost_and_new_workers_are_planned_for_once_they_settle() -> None:
    service = Service(LIGHT, cluster(1))
    service.run(LIGHT, 60)
    encoder = next(w for w in service.workers if service.plan.type_of(w.worker_id, "one") is PlacementType.E)
    everyone, lost_s = service.workers, service.now_s
    service.workers = [worker for worker in everyone if worker != encoder]
    service.run(LIGHT, 10)
    ((found_s, _, plan),) = service.proposed
    assert 2 <= found_s - lost_s <= 4
    assert set(plan.replicas) == {worker.worker_id for worker in service.workers}
    assert service.types()[PlacementType.E] == 1
    assert plan.reason.startswith("1 workers lost, 0 new; ")
    service.workers = everyone
    service.run(LIGHT, 10)
    assert service.proposed[-1][2].reason.startswith("0 workers lost, 1 new; ")
    assert set(service.plan.replicas) == {worker.worker_id for worker in everyone}
    assert len(service.proposed) == 2
    # The same worker again.
    service.workers = [worker for worker in everyone if worker != encoder]
    service.run(LIGHT, 10)
    assert len(service.proposed) == 3


def test_workers_that_never_came_are_not_lost() -> None:
    service = Service(LIGHT, cluster(1))
    everyone = service.workers
    service.workers = everyone[:6]
    service.run([], 30)
    service.workers = everyone
    service.run([], 30)
    assert service.proposed == []


def test_too_few_workers_for_any_plan_are_said_once() -> None:
    service = Service(LIGHT, cluster(1))
    service.run(LIGHT, 20)
    service.workers = service.workers[:1]
    service.run(LIGHT, 2.5)
    assert service.replanner.verdict.startswith("7 workers lost, 0 new; no plan for those that there are: 1 workers")
    service.run(LIGHT, 20)
    service.workers = []
    service.run(LIGHT, 20)
    assert service.proposed == []
    assert service.replanner.verdict == "there are no workers"


def test_measured_rates_reach_the_plan() -> None:
    """E takes as long as D, not a hundredth of that as in the profile: more workers must hold it."""
    service = Service(HEAVY, cluster())
    before = service.types()[PlacementType.E]
    service.run(HEAVY, 20)
    for _ in range(20):
        for kind, stage, seconds in (
            (PlacementType.E, Stage.ENCODE, 2.0),
            (PlacementType.DC, Stage.DIFFUSE, 2.0),
            (PlacementType.DC, Stage.DECODE, 1.0),
        ):
            report = StageReport(
                "one", kind, LARGE, 1, StageSpan(stage, service.now_s - seconds, service.now_s, ("w",))
            )
            service.replanner.stage_finished(report)
    service.workers = service.workers[:-1]
    service.run(HEAVY, 10)
    assert len(service.plan.replicas) == len(service.workers)
    assert service.types()[PlacementType.E] > before


def test_a_tick_between_two_looks_is_one_call() -> None:
    service = Service(LIGHT, cluster(64))
    service.run(LIGHT, 5)
    propose = partial(service.replanner.propose, service.workers, service.plan, service.now_s)
    assert propose() is None
    assert calls_in(propose) == 1


def test_settings_must_be_numbers_from_0() -> None:
    with pytest.raises(ConfigError, match="settle_s is -1"):
        ReplanOptions(settle_s=-1)


loads = st.lists(
    st.builds(
        LoadShare,
        model=st.just("one"),
        shape=st.sampled_from(SHAPES[:3]),
        num_inference_steps=st.just(20),
        weight=st.floats(0.5, 30),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=20)
@given(st.lists(loads, min_size=2, max_size=3))
def test_whatever_comes_plans_are_whole_and_better(phases: list[list[LoadShare]]) -> None:
    service = Service([*LIGHT, *phases[0]], cluster(2))
    for load in phases:
        service.run(load, 60)
    for _, old, new in service.proposed:
        assert set(new.replicas) == {worker.worker_id for worker in service.workers}
        assert new.epoch == old.epoch + 1
        compute_stage_speeds(new, [*LIGHT, *phases[0]], orchestrator().build_costs(service.workers))
