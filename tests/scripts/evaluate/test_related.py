"""The settings of related systems: their cells, modelled GPUs, and the table beside the papers' figures."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from lib.evaluate.cells import Cell
from lib.evaluate.related_systems.comparison import FIGURES, find_good_rate, make_related_table, write_related
from lib.evaluate.related_systems.settings import RELATED, ModelledGpu, list_related_cells
from lib.evaluate.rows import CellResult
from lib.evaluate.scenes import run_cell

from profiler import load_tables
from tests.scripts.evaluate.results import SETTINGS, made
from tridentserve.requests import Shape
from tridentserve.stages import Stage

(L20,) = load_tables(["l20"])
MODELS = {"sd3-medium": 0.9, "cogvideox1.5-5b": 0.3}


def make_result(cell: Cell, on_time: float, mean_s: float) -> CellResult:
    result = made(cell, on_time, mean_s)
    models = {model: {"slo_attainment": share, "wait_s": mean_s} for model, share in MODELS.items()}
    return replace(result, details={"models": models, "latency_per_work_s": mean_s})


def make_results() -> dict[Cell, CellResult]:
    """Systems have 0.8 on time, all others 0.6, and half their latency."""
    return {
        cell: make_result(cell, *((0.8, 2.0) if cell.policy == RELATED[cell.workload].system else (0.6, 4.0)))
        for cell in list_related_cells(seeds=1)
    }


def test_every_figure_has_a_setting_and_every_setting_a_figure() -> None:
    assert {figure.setting for figure in FIGURES} == RELATED.keys()


def test_the_policies_of_a_setting_meet_the_same_trace() -> None:
    cells = list(list_related_cells(seeds=2))
    assert len(set(cells)) == len(cells)
    assert [cell.policy for cell in cells[:6]] == list(RELATED[cells[0].workload].policies)
    assert len({cell.trace_seed for cell in cells}) == 2 * len(RELATED)


def test_a_modelled_gpu_divides_all_times_and_pays_for_exchanges_at_wide_degrees() -> None:
    plain = ModelledGpu("twice", 2.0, "a test", 80).model_table(L20)
    assert [2 * row.seconds for row in plain.rows] == pytest.approx([row.seconds for row in L20.rows])
    linked = ModelledGpu("linked", 2.0, "a test", 80, nvlink_gb_s=450).model_table(L20)
    step_s = {
        row.degree: row.seconds
        for row in linked.rows
        if (row.model, row.stage, row.shape, row.batch) == ("flux.1-dev", Stage.DIFFUSE, Shape(2048, 2048), 1)
    }
    for degree in (2, 4, 8):
        assert step_s[1] / degree < step_s[degree] < 1.1 * step_s[1] / degree


def test_figures_are_leads_ratios_and_shares() -> None:
    table = make_related_table(make_results())
    ours = {(row[0].split()[0], row[1]): row[4] for row in table.rows}
    assert len(table.rows) == len(FIGURES)
    assert ours["tetriserve-uniform", "on time, less the best fixed degree's, SLO scale 1.1"] == "+0.200"
    assert ours["genserve", "all / images / videos on time, SLO scale 0.5"] == "0.80 / 0.90 / 0.30"
    assert ours["genserve", "the same, FCFS (4 GPUs each)"] == "4.00 s"
    assert ours["dit-serve", "the same, mean latency"] == "2.00 / 2.00 / 2.00"
    assert ours["patchedserve", "rate with 90 % on time, over that of FCFS"] == "-"
    assert "the times of the L20 table" in table.note


def test_a_setting_without_all_results_has_no_rows(tmp_path: Path) -> None:
    whole = make_results()
    missing = next(cell for cell in whole if cell.workload.startswith("genserve"))
    table = make_related_table({cell: result for cell, result in whole.items() if cell != missing})
    assert not any(row[0].startswith("genserve") for row in table.rows)
    with write_related(tmp_path, table).open(newline="") as file:
        assert [row["setting"] for row in csv.DictReader(file)] == [row[0] for row in table.rows]


def test_the_rate_with_90_percent_on_time_lies_between_two_rates() -> None:
    assert find_good_rate((1.0, 2.0, 3.0), (1.0, 0.95, 0.85)) == pytest.approx(2.5)
    assert find_good_rate((1.0, 2.0), (1.0, 0.95)) is None
    assert find_good_rate((1.0, 2.0), (0.5, 0.4)) is None


def test_a_cell_runs_on_the_papers_cluster_with_a_policy_by_dotted_path() -> None:
    cells = [cell for cell in list_related_cells(seeds=1) if cell.workload.startswith("patchedserve")]
    for cell in cells[:2]:
        result = run_cell(cell, replace(SETTINGS, duration_s=30.0))
        assert result.row["gpus"] == 8
        assert result.row["completed"] == result.row["requests"] >= 5
        assert result.details["models"]["sd3-medium"]["slo_attainment"] == 1.0
        assert result.details["latency_per_work_s"] > 0
