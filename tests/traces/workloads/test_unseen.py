"""Cells whose parameters are drawn: their ranges, and that requests follow the parameters."""

from __future__ import annotations

import pytest

from profiler import CostModel, load_tables
from traces.workloads.arrivals import Arrival
from traces.workloads.unseen import UnseenCell, draw_cell, make_unseen_trace, make_unseen_traces
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.estimation.plan_estimates import stage_seconds
from tridentserve.stages import Stage

TIMES = CostModel(load_tables(["l20"]), "NVIDIA L20")
CELLS = [draw_cell(1, index) for index in range(400)]


def test_the_same_seed_draws_the_same_cells_and_another_one_others() -> None:
    assert [draw_cell(1, index) for index in range(20)] == CELLS[:20]
    assert not {draw_cell(2, index) for index in range(20)} & set(CELLS)
    assert len(set(CELLS)) == len(CELLS)


def test_half_of_the_cells_at_full_cost_have_few_gpus() -> None:
    full = [cell for cell in CELLS if not cell.diffuse_only]
    assert {cell.gpus for cell in full} == {4, 8, 16, 32, 64, 128, 256}
    assert sum(cell.gpus <= 16 for cell in full) / len(full) == pytest.approx(0.5, abs=0.1)
    assert {cell.gpus for cell in CELLS if cell.diffuse_only} == {128}


def test_parameters_cover_their_ranges() -> None:
    assert {len(cell.models) for cell in CELLS} == {1, 2}
    assert {cell.pattern for cell in CELLS} == {"poisson", "gamma", "diurnal", "spikes"}
    assert "recorded" in {draw_cell(1, index, has_recorded=True).pattern for index in range(50)}
    for values, low, high in (
        ([cell.load for cell in CELLS], 0.5, 1.5),
        ([scale for cell in CELLS for scale in cell.deadline_scales], 1.5, 5.0),
        ([cell.cv for cell in CELLS], 0.5, 4.0),
    ):
        assert low <= min(values) < low + 0.1 * (high - low)
        assert high - 0.1 * (high - low) < max(values) <= high


def find_cell(pattern: str, phases: int = 1) -> UnseenCell:
    has_recorded = pattern == "recorded"
    cells = (draw_cell(3, index, has_recorded) for index in range(500))
    return next(cell for cell in cells if (cell.pattern, cell.phases) == (pattern, phases) and cell.gpus <= 16)


@pytest.mark.parametrize("pattern", ["poisson", "diurnal", "spikes", "recorded"])
def test_the_load_is_what_arrives_at_the_cheapest_degrees(pattern: str) -> None:
    recorded = [[Arrival(float(time_s)) for time_s in range(5000)]]
    cell = find_cell(pattern)
    requests = make_unseen_trace(cell, TIMES, recorded)
    work = 0.0
    for request in requests:
        shape = Shape(request.height, request.width, request.num_frames)
        spec = RequestSpec("r", str(request.model), shape, request.num_inference_steps)
        work += sum(
            min(k * stage_seconds(TIMES, spec, stage, k) for k in TIMES.degrees(spec.model, stage)) for stage in Stage
        )
    assert work / (cell.gpus * requests[-1].timestamp_s) == pytest.approx(cell.load, rel=0.35)
    times_s = [request.timestamp_s for request in requests]
    assert times_s == sorted(times_s)
    assert len(requests) > 200


def test_requests_have_the_cells_models_sizes_steps_and_deadlines() -> None:
    cell = find_cell("poisson", phases=3)
    requests = make_unseen_trace(cell, TIMES, ())
    steps = {part.model: part.num_inference_steps for part in cell.models}
    shapes = {part.model: set(part.shapes) for part in cell.models}
    scales = set()
    for request in requests:
        model, shape = str(request.model), Shape(request.height, request.width, request.num_frames)
        assert request.num_inference_steps == steps[model]
        assert shape in shapes[model]
        spec = RequestSpec("r", model, shape, request.num_inference_steps)
        alone_s = sum(stage_seconds(TIMES, spec, stage, TIMES.optimal_degree(model, stage, shape)) for stage in Stage)
        assert request.slo_ms is not None
        scales.add(round(request.slo_ms / 1000 / alone_s, 6))
    assert scales == {round(scale, 6) for scale in cell.deadline_scales}


def test_a_phase_has_a_mix_of_its_own() -> None:
    cell = find_cell("poisson", phases=2)
    first, second = cell.models[0].weights
    assert first != second
    for weights in (first, second):
        assert sum(weights) == pytest.approx(1)


def test_a_cell_of_few_requests_has_several_traces_and_one_of_many_a_single_one() -> None:
    few = find_cell("poisson")
    traces = make_unseen_traces(few, TIMES, ())
    assert 850 <= sum(map(len, traces)) <= 1150
    assert len({tuple(request.timestamp_s for request in trace) for trace in traces}) == len(traces) > 1
    assert traces == make_unseen_traces(few, TIMES, ())
    many = next(cell for cell in CELLS if cell.gpus == 256)
    assert len(make_unseen_traces(many, TIMES, ())) == 1
