"""All stages on every worker: where that serves at least as much, what it costs, and what it needs of memory."""

from __future__ import annotations

import pytest

from dispatch import DispatchOptions, IlpDispatcher
from placement import LoadShare, Orchestrator
from placement.demands import compute_stage_speeds
from profiler import CostModel, load_cost_model
from tests.profiler.synthetic import DEGREES, MIB, SHAPES, cost_model
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import PlacementError
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.protocols import ClusterView, PendingRequest, WorkerView
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage

RESERVE_BYTES = 10 * MIB
LARGE = SHAPES[2]
# At 1024x1024: weights E 400, D 800, C 100 MiB, peaks 50, 391 and 1536 MiB. All weights with C's peak are 2836 MiB.
MERGED_MIB, C_APART_MIB = 2836 + 10, 100 + 1536 + 10


def cluster(count: int, memory_mib: int) -> list[WorkerSpec]:
    return [WorkerSpec(f"w{i}", "n0", memory_mib * MIB, "gpu") for i in range(count)]


def view(plan: PlacementPlan, workers: list[WorkerSpec]) -> list[WorkerView]:
    return [
        WorkerView(w.worker_id, w.node_id, w.memory_bytes, plan.replicas[w.worker_id], idle=True, free_at_s=0.0)
        for w in workers
    ]


def make_plan(times: CostModel, workers: list[WorkerSpec], *models: str, one_pool: bool = True) -> PlacementPlan:
    load = [LoadShare(model, LARGE, 20) for model in models]
    return Orchestrator(times, RESERVE_BYTES, DEGREES, one_pool).plan(load, workers)


@pytest.mark.parametrize("memory_mib", [MERGED_MIB, MERGED_MIB - 1, C_APART_MIB])
def test_few_workers_hold_all_stages_also_where_c_must_run_apart(memory_mib: int) -> None:
    times, workers = cost_model(), cluster(4, memory_mib)
    plan = make_plan(times, workers, "one")
    assert all(plan.type_of(worker.worker_id, "one") is PlacementType.EDC for worker in workers)
    request = RequestSpec("r", "one", LARGE, 20)
    dispatcher = IlpDispatcher(times, DispatchOptions(handoff_reserve_bytes=RESERVE_BYTES, segment_s=1e9))
    pending = PendingRequest(request, 0.0, 1e6, 0, False, None)
    (assignment,) = dispatcher.decide(ClusterView(0.0, (pending,), (), view(plan, workers))).assignments
    merges = memory_mib >= MERGED_MIB
    assert assignment.apart == (frozenset() if merges else {Stage.DECODE})
    assert assignment.decode == assignment.diffuse[:1]


def test_with_less_memory_than_the_largest_stage_needs_nothing_fits() -> None:
    with pytest.raises(PlacementError, match="fits on no worker"):
        make_plan(cost_model(), cluster(4, C_APART_MIB - 1), "one")


def test_the_paper_s_algorithm_takes_auxiliaries_where_not_all_stages_fit_at_once() -> None:
    workers = cluster(4, MERGED_MIB - 1)
    plan = make_plan(cost_model(), workers, "one", one_pool=False)
    assert {plan.type_of(worker.worker_id, "one") for worker in workers} == {PlacementType.DC, PlacementType.E}


def test_models_that_do_not_fit_at_once_are_all_on_every_worker_where_that_serves_as_much() -> None:
    times, workers = cost_model(("one", "two")), cluster(3, MERGED_MIB)  # one and a half for each
    plan = make_plan(times, workers, "one", "two")
    everything = {Replica(model, stage) for model in ("one", "two") for stage in Stage}
    assert all(held == everything for held in plan.replicas.values())
    assert "leave and come back" in plan.reason
    both = make_plan(times, cluster(2, 2 * MERGED_MIB), "one", "two")
    assert both.reason == "every worker holds all stages"


def test_the_load_of_such_workers_is_measured_like_that_of_others() -> None:
    times, workers = cost_model(), cluster(4, C_APART_MIB)
    plan = make_plan(times, workers, "one")
    costs = Orchestrator(times, RESERVE_BYTES, DEGREES, one_pool=True).build_costs(workers)
    (speed,) = compute_stage_speeds(plan, [LoadShare("one", LARGE, 20)], costs).values()
    assert speed.workers == 4
    assert speed.work > 0


def test_many_workers_are_divided_where_that_serves_more() -> None:
    """Requests of few steps, whose models push each other's weights out where every worker holds them all. Four workers
    are too few to divide."""
    times = load_cost_model(["l20"], "NVIDIA L20")
    load = [
        LoadShare("flux.1-dev", Shape(512, 512), 1),
        LoadShare("sd3-medium", Shape(512, 512), 5),
        LoadShare("hunyuanvideo", Shape(720, 1280, 17), 1),
    ]
    for count, are_all_equal in ((4, True), (128, False)):
        workers = [WorkerSpec(f"w{i}", f"n{i // 8}", 48 * 10**9, "NVIDIA L20") for i in range(count)]
        plan = Orchestrator(times, 2**30, DEGREES, one_pool=True).plan(load, workers)
        assert (len(set(plan.replicas.values())) == 1) == are_all_equal
