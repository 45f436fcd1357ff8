"""The degree at which a request is expected to begin is the one that the default policy gives it."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from dispatch import DispatchOptions, IlpDispatcher
from tests.dispatch.cluster import decide, request, worker, workers
from tests.profiler.synthetic import DEGREES, SHAPES, cost_model
from tridentserve.requests import Shape
from tridentserve.scheduling.prediction.costs import estimate_costs
from tridentserve.scheduling.prediction.degrees import (
    appraise_ways,
    expect_first_way,
    find_asked_efficiency,
    list_ways,
)

TIMES, OPTIONS = cost_model(), DispatchOptions(time_limit_s=30.0)
OBJECTIVE = OPTIONS.objective


@given(st.sampled_from(SHAPES), st.integers(1, 4), st.floats(1.01, 6.0))
def test_a_lone_request_begins_at_the_degree_that_is_expected(shape: Shape, num_idle: int, slack: float) -> None:
    """The other workers of the node are busy for a moment, which a request waits for that is in time only then. Before
    arrivals are known the policy asks for no efficiency."""
    costs = estimate_costs(TIMES, request("r", shape).spec, max(DEGREES), OPTIONS.min_efficiency)
    ways = list_ways(costs, 20, encodes=True)
    slo_s = slack * min(way.seconds for way in ways)
    idle = workers(num_idle, "EDC")
    busy = [worker(f"n0-busy{n}", "EDC", free_at_s=1e-6) for n in range(4 - num_idle)]
    assignments = decide(IlpDispatcher(TIMES, OPTIONS), [request("r", shape, slo_s)], [*idle, *busy], now_s=0.0)
    assume(assignments)
    expected = expect_first_way(ways, costs.optimal, slo_s, OBJECTIVE.spare, 0.0, num_idle)
    assert expected.degree == len(assignments[0].diffuse)


def test_a_request_that_no_idle_group_serves_in_time_waits_for_the_narrowest_that_does() -> None:
    costs = estimate_costs(TIMES, request("r", SHAPES[3]).spec, max(DEGREES), OPTIONS.min_efficiency)
    ways = list_ways(costs, 20, encodes=True)
    at_one, at_two, at_four = ways
    left_s = (at_one.seconds + at_two.seconds) / 2
    assert expect_first_way(ways, costs.optimal, left_s, 0.0, 0.0, 1) == at_two
    assert expect_first_way(ways, costs.optimal, left_s, 0.0, 0.0, 4) == at_four


def test_a_hopeless_request_begins_at_its_optimal_degree() -> None:
    costs = estimate_costs(TIMES, request("r", SHAPES[3]).spec, max(DEGREES), OPTIONS.min_efficiency)
    ways = list_ways(costs, 20, encodes=True)
    assert appraise_ways(ways, costs.optimal, 0.01, 0.1, 0.8).is_hopeless
    assert expect_first_way(ways, costs.optimal, 0.01, 0.1, 0.8, 1).degree == costs.optimal


def test_less_efficiency_is_asked_for_at_a_low_load() -> None:
    assert find_asked_efficiency(0.0, 0.8) == 0.0
    assert 0.0 < find_asked_efficiency(0.3, 0.8) < find_asked_efficiency(0.6, 0.8) < 0.8
    assert find_asked_efficiency(2.0, 0.8) == 0.8
