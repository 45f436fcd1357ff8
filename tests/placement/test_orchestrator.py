"""The start plan: V0 while memory allows, shares by work, every demanded type workable, errors with their cause."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch import DispatchOptions, IlpDispatcher
from placement import LoadShare, Orchestrator
from profiler import CostModel, load_cost_model
from tests.profiler.synthetic import DEGREES, EDC_BYTES, MIB, SHAPES, WEIGHTS_BYTES, cost_model, table, wide_only_table
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import PlacementError, ProfileError
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import WorkerView
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage

SMALL, LARGE = SHAPES[0], SHAPES[3]
TIMES = cost_model()


def cluster(nodes: int, per_node: int, memory_bytes: int = EDC_BYTES) -> list[WorkerSpec]:
    return [WorkerSpec(f"n{n}-w{i}", f"n{n}", memory_bytes, "gpu") for n in range(nodes) for i in range(per_node)]


def orchestrator(reserve_bytes: int = 10 * MIB, degrees: tuple[int, ...] = DEGREES) -> Orchestrator:
    return Orchestrator(TIMES, reserve_bytes, degrees, one_pool=False)


def types(plan: PlacementPlan, model: str = "one") -> Counter[PlacementType | None]:
    counts = Counter(plan.type_of(worker_id, model) for worker_id in plan.replicas)
    del counts[None]
    return counts


def test_everything_is_together_while_memory_allows() -> None:
    plan = orchestrator().plan([LoadShare("one", SMALL, 20)], cluster(1, 4), epoch=3)
    assert types(plan) == {PlacementType.EDC: 4}
    assert plan.epoch == 3
    assert plan.reason == "one V0 brings 100% of the work: 4 EDC"


def replica_with(memory_mib: int, shape: Shape) -> set[PlacementType | None]:
    return set(types(orchestrator().plan([LoadShare("one", shape, 20)], cluster(1, 4, memory_mib * MIB))))


def test_the_first_virtual_replica_that_fits_is_taken() -> None:
    # At 1024x1024: weights 400 + 800 + 100 MiB, peaks E 50, D 391 at degree 1 (196, 98 wider), C 1536 MiB.
    shape = SHAPES[2]
    assert replica_with(1300 + 1536 + 10, shape) == {PlacementType.EDC}
    assert replica_with(1300 + 1536 + 9, shape) == {PlacementType.DC, PlacementType.E}
    # Without C beside it, ED needs 1200 + 391 MiB, but C alone needs 100 + 1536.
    assert replica_with(900 + 1536 + 9, shape) == {PlacementType.ED, PlacementType.C}


def test_stages_are_apart_where_no_two_fit() -> None:
    # 512x512: D 800 + 98 MiB, C 100 + 384, E 400 + 50; ED would need 1298 at degree 1, DC 1284 whatever the degree.
    assert replica_with(1200 + 50 + 9, SHAPES[1]) == {PlacementType.D, PlacementType.E, PlacementType.C}


def test_a_size_that_fits_nowhere_is_named() -> None:
    with pytest.raises(
        PlacementError, match=r"one at 2048x2048 fits on no worker: stage C alone needs \d+ bytes .* has 3145"
    ):
        orchestrator().plan([LoadShare("one", LARGE, 20)], cluster(1, 4))


def test_workers_are_shared_by_work_and_every_model_is_covered() -> None:
    load = [LoadShare("one", SMALL, 20, weight=100), LoadShare("two", SHAPES[1], 20, weight=100)]
    plan = orchestrator().plan(load, cluster(2, 8))
    one, two = types(plan, "one"), types(plan, "two")
    assert sum(one.values()) + sum(two.values()) == 16
    assert sum(two.values()) > 2 * sum(one.values())
    rare = orchestrator().plan([*load, LoadShare("two", SMALL, 1, weight=0)], cluster(2, 8))
    assert rare == plan
    tiny = orchestrator().plan([LoadShare("one", SMALL, 1, weight=1e-6), load[1]], cluster(1, 4))
    assert sum(types(tiny, "one").values()) == 1


def test_heavy_requests_get_their_own_virtual_replica_in_addition_to_the_light_ones() -> None:
    load = [LoadShare("one", SMALL, 20, weight=10), LoadShare("one", SHAPES[2], 20, weight=1)]
    memory_bytes = (900 + 1536 + 20) * MIB
    plan = orchestrator().plan(load, cluster(2, 8, memory_bytes))
    found = types(plan)
    assert {PlacementType.EDC, PlacementType.DC, PlacementType.E} <= set(found)
    assert "one V0 brings" in plan.reason
    assert "one V1 brings" in plan.reason
    # Two workers cannot hold V0 and V1 both: V1, which runs all of the load, takes them.
    assert types(orchestrator().plan(load, cluster(1, 2, memory_bytes))) == {PlacementType.DC: 1, PlacementType.E: 1}


@pytest.mark.parametrize(
    ("load", "workers", "message"),
    [
        ([], cluster(1, 1), "the load is empty"),
        ([LoadShare("one", SMALL, 20, weight=0.0)], cluster(1, 1), "the load is empty"),
        ([LoadShare("one", SMALL, 20)], [], "there are no workers"),
        ([LoadShare("one", SMALL, 20)], [WorkerSpec("w", "n", 0)], "worker w has 0 bytes of memory"),
        ([LoadShare("one", SMALL, 20)], cluster(1, 1) * 2, "worker n0-w0 is in the cluster 2 times"),
        (
            [LoadShare("one", SHAPES[2], 20), LoadShare("two", SHAPES[2], 20)],
            cluster(1, 1),
            "1 workers are too few; needed at least: one V0 1, two V0 1; .*do not fit on top",
        ),
    ],
)
def test_what_cannot_be_placed_is_a_named_error(load: list[LoadShare], workers: list[WorkerSpec], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        orchestrator().plan(load, workers)


def test_bad_settings_and_loads_are_refused() -> None:
    with pytest.raises(PlacementError, match="handoff_reserve_bytes is -1"):
        Orchestrator(TIMES, -1, DEGREES, one_pool=True)
    for degrees in ([], [3], [0]):
        with pytest.raises(PlacementError, match="give powers of two"):
            Orchestrator(TIMES, 0, degrees, one_pool=True)
    with pytest.raises(PlacementError, match=r"one was profiled at degrees \(1, 2, 4\), in use are \(8,\)"):
        orchestrator(degrees=(8,)).plan([LoadShare("one", SMALL, 20)], cluster(1, 8))
    with pytest.raises(PlacementError, match="weight is nan"):
        LoadShare("one", SMALL, 20, weight=float("nan"))
    with pytest.raises(PlacementError, match="num_inference_steps is 0"):
        LoadShare("one", SMALL, 0)
    with pytest.raises(ProfileError, match="'three' is not in the profile"):
        orchestrator().plan([LoadShare("three", SMALL, 20)], cluster(1, 1))


def test_memory_may_force_primaries_together() -> None:
    # Without the peaks of C, 2048x2048 needs 1300 + 1562 / k MiB for EDC and 800 + 1562 / k for D.
    rows = [replace(row, peak_bytes=MIB) if row.stage is Stage.DECODE else row for row in table().rows]
    times = CostModel([replace(table(), rows=tuple(rows))], "gpu")
    wide = Orchestrator(times, 0, DEGREES, one_pool=True, together=False)
    load = [LoadShare("one", LARGE, 20), LoadShare("two", SMALL, 20)]
    uneven = [WorkerSpec(f"n{n}-w{i}", f"n{n}", 2100 * MIB) for n, size in enumerate((1, 2, 1)) for i in range(size)]
    plan = wide.plan(load, uneven)
    assert [plan.type_of(f"n1-w{i}", "one") for i in range(2)] == [PlacementType.EDC] * 2
    with pytest.raises(PlacementError, match="two needs 2 EDC workers in one node and gets 1"):
        wide.plan([LoadShare("one", LARGE, 20), LoadShare("two", LARGE, 20)], uneven)
    with pytest.raises(PlacementError, match="one at 2048x2048 fits on no worker: stage D alone"):
        wide.plan(load, cluster(3, 1, 2100 * MIB))


def test_what_is_planned_for_wide_degrees_can_run_there() -> None:
    times = CostModel([wide_only_table()], "gpu")
    workers = cluster(1, 4)
    plan = Orchestrator(times, 0, DEGREES, one_pool=True).plan([LoadShare("one", SHAPES[2], 20)], workers)
    views = [
        WorkerView(w.worker_id, w.node_id, w.memory_bytes, plan.replicas[w.worker_id], idle=True, free_at_s=0.0)
        for w in workers
    ]
    assert IlpDispatcher(times).can_ever_run(RequestSpec("r", "one", SHAPES[2], 20), views) is None


def test_weights_that_no_worker_holds_are_named() -> None:
    with pytest.raises(
        PlacementError, match=r"one: the weights of diffuse alone .* 2 of them would hold them together"
    ):
        orchestrator().plan([LoadShare("one", SMALL, 20)], cluster(1, 8, 800 * MIB))
    with pytest.raises(PlacementError, match="no group of them would hold them"):
        orchestrator().plan([LoadShare("one", SMALL, 20)], cluster(1, 8, 10 * MIB))


def can_run(plan: PlacementPlan, workers: list[WorkerSpec], share: LoadShare) -> bool:
    """The dispatcher checks memory, degrees and coverage on its own."""
    views = [
        WorkerView(w.worker_id, w.node_id, w.memory_bytes, plan.replicas[w.worker_id], idle=True, free_at_s=0.0)
        for w in workers
    ]
    dispatcher = IlpDispatcher(TIMES, DispatchOptions(handoff_reserve_bytes=10 * MIB))
    return dispatcher.can_ever_run(RequestSpec("r", share.model, share.shape, 20), views) is None


def test_models_are_stacked_where_workers_are_too_few() -> None:
    load = [LoadShare("one", SMALL, 20), LoadShare("two", SMALL, 20, weight=3)]
    # 2 x 1300 MiB of weights, and peaks.
    plan = orchestrator().plan(load, cluster(1, 1))
    assert plan.describe("n0-w0") == "one:EDC+two:EDC"
    assert plan.reason.startswith("1 workers hold several models each")
    # Three models on two workers, of which each has room for two at a time: the third one's weights come and go.
    names = ("one", "two", "three")
    three = Orchestrator(cost_model(names), 10 * MIB, DEGREES, one_pool=True)
    plan = three.plan([LoadShare(name, SMALL, 20) for name in names], cluster(1, 2))
    assert all(types(plan, name) == {PlacementType.EDC: 2} for name in names)
    assert "leave and come back" in plan.reason


def test_auxiliaries_that_are_hardly_used_share_a_worker() -> None:
    load = [LoadShare("one", SHAPES[2], 20), LoadShare("two", SHAPES[2], 20)]
    workers = cluster(1, 8, (900 + 1536 + 20) * MIB)
    plan = orchestrator().plan(load, workers)
    assert types(plan, "one")[PlacementType.DC] + types(plan, "two")[PlacementType.DC] == 7
    assert [plan.describe(w.worker_id) for w in workers].count("one:E+two:E") == 1
    assert "the worker with one E holds two E too" in plan.reason
    assert all(can_run(plan, workers, share) for share in load)


def test_kept_sizes_stay_servable_with_next_to_no_workers() -> None:
    # EDC has 340 MiB beside its weights: enough for 256x256, and too little for 1024x1024 unless weights leave.
    workers = cluster(1, 8, (1300 + 340 + 10) * MIB)
    light, heavy = LoadShare("one", SMALL, 20, 100.0), LoadShare("one", SHAPES[2], 20, 5.0)
    assert types(orchestrator().plan([light], workers)) == {PlacementType.EDC: 8}
    kept = orchestrator().plan([light], workers, keep=[heavy])
    assert types(kept) == {PlacementType.EDC: 6, PlacementType.ED: 1, PlacementType.C: 1}
    assert can_run(kept, workers, heavy)
    # ED and C run the light ones too: keeping them changes nothing, and neither does their weight.
    assert (
        orchestrator().plan([heavy], workers, keep=[light]).replicas == orchestrator().plan([heavy], workers).replicas
    )
    other = orchestrator().plan([light], workers, keep=[LoadShare("two", SMALL, 20, 1e9)])
    assert sum(types(other, "two").values()) == 1


def test_measured_rates_decide_the_split() -> None:
    workers = cluster(1, 8, (900 + 1536 + 20) * MIB)
    load = [LoadShare("one", SHAPES[2], 20)]
    rates = {("one", PlacementType.DC): 1.0, ("one", PlacementType.E): 1.0}
    assert types(orchestrator().plan(load, workers, rates=rates)) == {PlacementType.DC: 4, PlacementType.E: 4}
    # One measured rate alone says nothing of their proportion.
    del rates["one", PlacementType.E]
    assert orchestrator().plan(load, workers, rates=rates) == orchestrator().plan(load, workers)


shares = st.builds(
    LoadShare,
    model=st.sampled_from(["one", "two"]),
    shape=st.sampled_from(SHAPES[:3]),
    num_inference_steps=st.integers(1, 50),
    weight=st.floats(0.001, 1000),
)


# Two models with each stage of each size on a worker of its own need 6 workers; 1024x1024 needs 1646 MiB for C.
sizes = st.tuples(st.integers(1, 4), st.integers(2, 8)).filter(lambda size: size[0] * size[1] >= 6)


@given(st.lists(shares, min_size=1, max_size=5), st.lists(shares, max_size=3), sizes, st.integers(1646, 4000))
def test_plans_serve_all_of_the_load_and_are_deterministic(
    load: list[LoadShare], keep: list[LoadShare], size: tuple[int, int], memory_mib: int
) -> None:
    workers = cluster(*size, memory_mib * MIB)
    plan = orchestrator().plan(load, workers, keep=keep)
    assert plan == orchestrator().plan(load[::-1], workers[::-1], keep=keep[::-1])
    assert set(plan.replicas) == {worker.worker_id for worker in workers}
    for worker in workers:
        held = plan.replicas[worker.worker_id]
        assert held
        assert sum(WEIGHTS_BYTES[replica.stage] for replica in held) <= worker.memory_bytes
        assert all(plan.type_of(worker.worker_id, replica.model) is not None for replica in held)
    assert all(can_run(plan, workers, share) for share in [*load, *keep])


def test_a_model_has_one_pool_that_runs_all_its_sizes_unless_set_otherwise() -> None:
    """Requests that wait for one pool while another is idle cost more than the transfers that a later type needs."""
    load = [LoadShare("flux.1-dev", Shape(side, side), 4, weight) for side, weight in ((1024, 5.0), (4096, 1.0))]
    workers = [replace(worker, device="NVIDIA L20") for worker in cluster(4, 8, 48 * 10**9)]
    times = load_cost_model(["l20"], "NVIDIA L20")

    def kinds(pooled: bool) -> set[PlacementType | None]:
        plan = Orchestrator(times, 2**30, (1, 2, 4, 8), pooled, together=False).plan(load, workers)
        return {plan.type_of(worker.worker_id, "flux.1-dev") for worker in workers}

    assert kinds(pooled=True) == {PlacementType.ED, PlacementType.C}
    assert kinds(pooled=False) > {PlacementType.EDC}


def test_c_stays_off_the_primaries_of_a_model_that_runs_wide() -> None:
    """HunyuanVideo's largest size would fit DC + E; the leader's decode would keep its block of 8 from being used."""
    times = load_cost_model(["l20"], "NVIDIA L20")
    workers = [replace(worker, device="NVIDIA L20") for worker in cluster(4, 8, 48 * 10**9)]
    load = [LoadShare("hunyuanvideo", Shape(720, 1280, frames), 6) for frames in (65, 129)]
    plan = Orchestrator(times, 2**30, (1, 2, 4, 8), one_pool=True, together=False).plan(load, workers)
    held = {plan.type_of(worker.worker_id, "hunyuanvideo") for worker in workers}
    assert PlacementType.C in held
    assert PlacementType.DC not in held
