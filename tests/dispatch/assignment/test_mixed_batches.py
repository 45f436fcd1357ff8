"""Batches of several sizes: they form where packed steps pay and where no deadline suffers, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.assembly.options import ServiceOptions
from deployments.assembly.simulation import SimulationSetup, simulate
from dispatch import DispatchOptions, IlpDispatcher
from profiler import CostModel
from tests.dispatch.cluster import decide, request, workers
from tests.profiler.packed import compute_step_s, make_cost_model
from tests.profiler.synthetic import EDC_BYTES, SHAPES
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated import SimulationOptions, SimulationResult
from tridentserve.protocols import PendingRequest
from tridentserve.requests import RequestSpec
from tridentserve.stages import Stage
from tridentserve.testing import find_violations

SMALL, MIDDLE, LARGE = SHAPES[:3]
MIXED = DispatchOptions(max_batch=8, pack_sizes=("one",), time_limit_s=30.0)
PAYS_S, FREE_S = 0.05, 0.0
# Room for a batch of eight of the largest size, by which the memory of mixed batches is judged.
ROOMY_BYTES = 8 * EDC_BYTES


def sizes(slo_s: float = 1000.0) -> list[PendingRequest]:
    return [request(f"r{i}", shape, slo_s + i) for i, shape in enumerate((SMALL, MIDDLE, LARGE))]


def ids(
    times: CostModel, pending: list[PendingRequest], options: DispatchOptions = MIXED, number: int = 1
) -> list[tuple[str, ...]]:
    views = workers(number, "EDC", memory_bytes=ROOMY_BYTES)
    return [each.request_ids for each in decide(IlpDispatcher(times, options), pending, views, 0.0)]


def test_requests_of_other_sizes_join_where_packed_steps_take_less_time() -> None:
    assert [set(batch) for batch in ids(make_cost_model(PAYS_S), sizes())] == [{"r0", "r1", "r2"}]


def test_where_packing_does_not_pay_nobody_joins() -> None:
    assert len(ids(make_cost_model(FREE_S), sizes())[0]) == 1
    assert len(ids(make_cost_model(PAYS_S, batches=(1,)), sizes())[0]) == 1


@pytest.mark.parametrize(
    "options", [replace(MIXED, pack_sizes=()), replace(MIXED, pack_sizes=("two",)), replace(MIXED, max_batch=1)]
)
def test_sizes_are_not_mixed_unless_the_options_ask_for_it(options: DispatchOptions) -> None:
    assert len(ids(make_cost_model(PAYS_S), sizes(), options)[0]) == 1


def test_with_idle_workers_for_all_nobody_is_packed() -> None:
    narrow = replace(MIXED, max_degree=1)
    assert sorted(ids(make_cost_model(PAYS_S), sizes(), narrow, number=3)) == [("r0",), ("r1",), ("r2",)]


def test_no_more_than_the_largest_batch_join() -> None:
    assert len(ids(make_cost_model(PAYS_S), sizes(), replace(MIXED, max_batch=2))[0]) == 2


def test_short_requests_have_a_worker_each_beside_a_long_one() -> None:
    """Two workers share the large one. Two small ones fill both alike, so that neither waits for the other; one alone
    would make a worker wait."""
    times = make_cost_model(FREE_S, group_s=0.0015)
    options = replace(MIXED, ring_sizes=("one",), max_degree=2)
    small = [request(f"small{index}", SMALL, 1000.0 + index, steps=100) for index in range(2)]
    large = request("large", MIDDLE, 1.6, steps=100)  # in time on two workers only
    assert set(ids(times, [large, *small], options, number=2)[0]) == {"large", "small0", "small1"}
    assert ids(times, [large, small[0]], options, number=2)[0] == ("large",)
    assert ids(times, [large, *small], replace(options, ring_sizes=()), number=2)[0] == ("large",)


def test_nobody_becomes_late_by_those_that_join() -> None:
    """Alone the first ends in time; with another it would not."""
    times = make_cost_model(PAYS_S)
    alone_s = 20 * compute_step_s(PAYS_S, [SMALL])
    urgent = [request("urgent", SMALL, 1.2 * alone_s), request("large", LARGE, 1000.0)]
    assert ids(times, urgent)[0] == ("urgent",)
    assert set(ids(times, [request("first", SMALL, 10 * alone_s), urgent[1]])[0]) == {"first", "large"}


def test_only_requests_that_differ_in_nothing_else_are_packed() -> None:
    others = [
        request("longer", MIDDLE, 2000.0, steps=21),
        request("more", MIDDLE, 2000.0, num_outputs=2),
        request("styled", MIDDLE, 2000.0, loras=("ink",)),
        request("failed before", MIDDLE, 2000.0, alone=True),
    ]
    assert ids(make_cost_model(PAYS_S), [request("r0", SMALL), *others])[0] == ("r0",)


def serve(once_s: float, options: DispatchOptions) -> tuple[SimulationResult, list[str]]:
    """Two workers, and twice as many requests of three sizes as they can serve one by one. Returns the violations
    too."""
    cluster = [WorkerSpec(f"w{number}", "n0", 64 << 30, "gpu", number) for number in range(2)]
    arrivals = [
        (0.5 * number, RequestSpec(f"r{number}", "one", SHAPES[number % 3], 20, slo_s=60.0)) for number in range(24)
    ]
    setup = SimulationSetup(
        cluster,
        lambda: make_cost_model(once_s),
        ServiceOptions("default", options),
        engine=SimulationOptions(keep_plans=True),
    )
    result = simulate(arrivals, setup)
    return result, find_violations(result, cluster)


def count_mixed(result: SimulationResult) -> int:
    """The plans with D of requests that differ in size. Request r(i) has size i mod 3."""
    return sum(
        len({int(name[1:]) % 3 for name in plan.request_ids}) > 1
        for plan in result.plans
        if any(span.stage is Stage.DIFFUSE for span in plan.spans)
    )


def test_a_simulated_service_packs_where_it_pays_and_not_where_it_does_not() -> None:
    apart = replace(MIXED, max_batch=1, max_degree=1)
    together = replace(MIXED, max_degree=1)
    packed, violations = serve(PAYS_S, together)
    assert violations == []
    assert packed.outcomes == {"finished": 24}
    assert count_mixed(packed) > 0
    alone, _ = serve(PAYS_S, apart)
    assert packed.duration_s < 0.9 * alone.duration_s

    free, violations = serve(FREE_S, together)
    assert violations == []
    assert count_mixed(free) == 0
