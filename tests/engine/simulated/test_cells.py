"""A cluster in cells: with one cell it is the engine itself; a cell that is lost loses no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.simulated.greedy import Greedy
from tests.engine.simulated.scenario import Scenario
from tridentserve.cells.division import divide_nodes
from tridentserve.cells.router import CellRouter
from tridentserve.engine.simulated import SimulationOptions, SimulationResult, WorkerFailure
from tridentserve.engine.simulated.cells import CellLoss, CellParts, SimulatedCells
from tridentserve.errors import ConfigError
from tridentserve.plans import PlacementPlan
from tridentserve.scheduling.estimation.request_work import estimate_work
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.testing import FixedTimes, find_violations, make_cluster, make_request

FOUR_NODES = {f"n{node}/w{place}": "EDC" for node in range(4) for place in range(2)}


def make_cells(num_cells: int, options: SimulationOptions, failures: Sequence[CellLoss] = ()) -> SimulatedCells:
    workers, placement = make_cluster(FOUR_NODES)
    parts = []
    for members in divide_nodes(workers, num_cells):
        held = PlacementPlan({worker.worker_id: placement.replicas[worker.worker_id] for worker in members})
        parts.append(CellParts(Scheduler(members, held, FixedTimes(), Greedy()), members, held, FixedTimes()))
    return SimulatedCells(parts, CellRouter(partial(estimate_work, FixedTimes()), seed=0), options, failures)


def make_options(**changes: object) -> SimulationOptions:
    return replace(SimulationOptions(handoff_capacity_bytes=16, group_bytes=0, keep_plans=True), **changes)  # type: ignore[arg-type]


@given(st.integers(0, 1000))
@settings(max_examples=10)
def test_one_cell_is_the_engine(seed: int) -> None:
    scenario = Scenario(seed, num_failures=2, checkpoint_s=1.0, solve_time=0.02)
    alone = scenario.run()
    options = SimulationOptions(
        solve_time=scenario.solve_time,
        jitter=scenario.jitter,
        seed=seed,
        group_setup_s=0.1,
        handoff_capacity_bytes=16,
        group_bytes=0,
        failures=scenario._failures(),
        keep_plans=True,
    )
    parts = CellParts(scenario.scheduler(), scenario.workers, scenario.placement, FixedTimes())
    router = CellRouter(partial(estimate_work, FixedTimes()), seed=0)
    in_cell = SimulatedCells([parts], router, options).run(scenario.trace())
    assert (in_cell.requests, in_cell.plans) == (alone.requests, alone.plans)
    assert replace(in_cell.counts, solve_seconds=0.0) == replace(alone.counts, solve_seconds=0.0)


def test_requests_go_where_workers_are_idle() -> None:
    result = make_cells(4, make_options()).run([(0.0, make_request(f"r{number}")) for number in range(4)])
    homes = {plan.workers[0].split("/")[0] for plan in result.plans}
    assert homes == {"n0", "n1", "n2", "n3"}
    assert len({request.latency_s for request in result.requests}) == 1


@given(st.floats(0.0, 30.0), st.integers(0, 3), st.integers(5, 30), st.floats(0.0, 0.1))
@settings(max_examples=25)
def test_a_lost_cell_loses_no_request(lost_s: float, lost: int, count: int, solve_s: float) -> None:
    cells = make_cells(4, make_options(solve_time=solve_s), [CellLoss(lost_s, lost)])
    result = cells.run([(0.5 * number, make_request(f"r{number}", slo_s=20.0)) for number in range(count)])
    assert result.outcomes == {"finished": count}
    workers, _ = make_cluster(FOUR_NODES)
    assert find_violations(drop_numbers(result), workers) == []
    assert all(plan.start_s <= lost_s for plan in result.plans if plan.workers[0].startswith(f"n{lost}/"))
    # A request that was sent again keeps its arrival, and so its deadline.
    assert all(request.slo_s == 20.0 for request in result.requests)
    assert [request.arrival_s for request in result.requests] == [0.5 * number for number in range(count)]
    assert result.counts.retries == sum(request.retries for request in result.requests)


def drop_numbers(result: SimulationResult) -> SimulationResult:
    """Plans of two cells may have the same number: here each has one of its own, in the order of their starts."""
    ordered = sorted(result.plans, key=lambda plan: (plan.start_s, plan.end_s))
    return replace(result, plans=[replace(plan, plan_id=number) for number, plan in enumerate(ordered)])


def test_the_deadline_of_a_request_that_was_sent_again_is_the_old_one() -> None:
    result = make_cells(2, make_options(), [CellLoss(3.0, 0)]).run([(0.0, make_request("r", slo_s=8.0))])
    (request,) = result.requests
    # Two workers need .5 s, 2 s and 2 s; begun anew at 3 s that is at the end of 7.5 s.
    assert (request.retries, request.end_s, request.slo_s, request.slo_met) == (1, 7.5, 8.0, True)


def test_without_any_cell_requests_are_refused() -> None:
    failures = [CellLoss(1.0, 0), CellLoss(1.0, 1)]
    result = make_cells(2, make_options(), failures).run([(0.0, make_request("r")), (2.0, make_request("s"))])
    assert result.outcomes == {"overloaded": 2}


def test_a_worker_that_is_lost_costs_its_own_cell_alone() -> None:
    failure = WorkerFailure(1.0, "n3/w0", 100.0)
    result = make_cells(4, make_options(failures=(failure,))).run(
        [(0.0, make_request(f"r{number}")) for number in range(4)]
    )
    assert result.outcomes == {"finished": 4}
    assert sorted(request.retries for request in result.requests) == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("options", "failures", "why"),
    [
        (make_options(), [CellLoss(1.0, 2)], "cell 2 is lost, but there are 2 cells"),
        (make_options(), [CellLoss(1.0, 0), CellLoss(2.0, 0)], "cell 0 is lost twice"),
        (make_options(failures=(WorkerFailure(1.0, "x", 1.0),)), [], "not in the cluster: x"),
    ],
)
def test_what_does_not_exist_cannot_be_lost(options: SimulationOptions, failures: Sequence[CellLoss], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_cells(2, options, failures)


def test_several_cells_have_no_common_log(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="decision_log"):
        make_cells(2, make_options(decision_log=f"{tmp_path}/log"))


def test_a_simulation_of_cells_runs_once() -> None:
    cells = make_cells(2, make_options())
    cells.run([])
    with pytest.raises(ConfigError, match="runs once"):
        cells.run([])
