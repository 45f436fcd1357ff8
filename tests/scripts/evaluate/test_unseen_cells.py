"""Unseen cells: the tables of results made by hand, and the command on a few small cells."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from evaluate import main
from lib.evaluate.cells import UNSEEN, Cell, list_unseen_cells
from lib.evaluate.rows import CellResult
from lib.evaluate.unseen import compare_unseen

from tests.scripts.evaluate.results import SETTINGS, made
from traces.workloads.unseen import draw_cell


def make_results(rows: list[tuple[bool, float, dict[str, tuple[float, float]]]]) -> dict[Cell, CellResult]:
    """For each cell whether D alone takes time, the bound, and on-time share and mean latency of each policy."""
    return {
        cell: made(cell, on_time, mean_s, bound_attainment=bound, parameters=json.dumps({"diffuse_only": alone}))
        for index, (alone, bound, policies) in enumerate(rows)
        for policy, (on_time, mean_s) in policies.items()
        for cell in [Cell("flux.1-dev", UNSEEN, 1.0, 7, policy, index)]
    }


def test_gaps_are_to_the_bound_where_it_can_be_reached_and_else_to_the_best_policy() -> None:
    results = make_results(
        [
            (False, 1.0, {"ours": (0.99, 2.0), "b4": (0.89, 3.0)}),
            (False, 1.0, {"ours": (0.60, 2.0), "b4": (0.70, 1.0)}),
        ]
    )
    gaps, duels = compare_unseen(results, ["ours", "b4"])
    assert gaps.title == "2 unseen cells, full cost"
    ours, b4 = gaps.rows
    assert [text.split()[0] for text in ours[1:5]] == ["0.010", "0.010", "0.100", "0.100"]
    assert [text.split()[0] for text in b4[1:5]] == ["0.110", "0.110", "0.000", "0.000"]
    assert ours[5].startswith("1.500 (")  # the median of 1 and 2
    ((against, ahead, behind, far_behind, lead, worst, *_),) = duels.rows
    assert (against, ahead, behind, far_behind, worst) == ("b4", "1", "1", "1", "-0.100")
    assert lead.startswith("0.000 (")


def test_cells_of_d_alone_have_tables_of_their_own_and_incomplete_ones_none() -> None:
    results = make_results(
        [
            (True, 1.0, {"ours": (1.0, 1.0), "b4": (1.0, 1.0)}),
            (False, 1.0, {"ours": (0.9, 1.0), "b4": (0.9, 1.0)}),
            (False, 1.0, {"ours": (0.1, 1.0)}),
        ]
    )
    titles = [table.title for table in compare_unseen(results, ["ours", "b4"])]
    assert [title.split(":")[0] for title in titles] == [
        *["1 unseen cells, D alone"] * 2,
        *["1 unseen cells, full cost"] * 2,
    ]


def test_all_policies_of_a_cell_meet_the_same_trace() -> None:
    cells = list(list_unseen_cells(1, range(3), ["default", "b4"], SETTINGS))
    assert [(cell.index, cell.policy) for cell in cells[:3]] == [(0, "default"), (0, "b4"), (1, "default")]
    assert cells[0].trace_seed == cells[1].trace_seed != cells[2].trace_seed
    assert cells[0].model == "+".join(part.model for part in draw_cell(1, 0).models)


def test_the_command_draws_cells_and_compares_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traces.workloads.unseen._FEWEST", 12)
    monkeypatch.setattr("traces.workloads.unseen._LENGTH", 1)
    options = ["--unseen", "2", "--seed", "5", "--policies", "segments", "b4", "--jobs", "1", "--out", str(tmp_path)]
    assert main(options) == 0
    shown = capsys.readouterr().out
    assert "unseen cells, " in shown
    last = json.loads(shown.splitlines()[-1])
    assert (last["cells"], last["finished"]) == (4, 4)
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        drawn = draw_cell(5, int(row["index"]))
        assert int(row["gpus"]) == drawn.gpus
        assert json.loads(row["parameters"])["load"] == drawn.load
        assert json.loads(row["options"])["simulation.jitter"] == drawn.jitter
