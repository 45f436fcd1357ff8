"""Unseen cells: the tables of results made by hand, and the command on a few small cells."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from evaluate import main
from lib.evaluate.cells import UNSEEN, Cell, list_unseen_cells
from lib.evaluate.kept.kept_table import KeptTable, read_rows
from lib.evaluate.unseen_cells.cell_table import UnseenRow
from lib.evaluate.unseen_cells.comparison import compare_unseen, sum_up_unseen

from tests.scripts.evaluate.results import SETTINGS, made
from traces.workloads.unseen import draw_cell


def make_rows(rows: list[tuple[bool, float, dict[str, tuple[float, float]]]]) -> list[UnseenRow]:
    """For each cell whether D alone takes time, the bound, and on-time share and mean latency of each policy."""
    found = []
    for index, (alone, bound, policies) in enumerate(rows):
        parameters = json.dumps({"diffuse_only": alone, "load": 1.0, "pattern": "poisson"})
        for policy, (on_time, mean_s) in policies.items():
            cell = Cell("flux.1-dev", UNSEEN, 1.0, 7, policy, index)
            result = made(cell, on_time, mean_s, bound_attainment=bound, parameters=parameters)
            found.append(UnseenRow.from_result(cell, result))
    return found


def test_gaps_are_to_the_bound_where_it_can_be_reached_and_else_to_the_best_policy() -> None:
    rows = make_rows(
        [
            (False, 1.0, {"ours": (0.99, 2.0), "b4": (0.89, 3.0)}),
            (False, 1.0, {"ours": (0.60, 2.0), "b4": (0.70, 1.0)}),
        ]
    )
    gaps, duels = compare_unseen(rows, ["ours", "b4"])
    assert gaps.title == "2 unseen cells, full cost"
    ours, b4 = gaps.rows
    assert [text.split()[0] for text in ours[1:5]] == ["0.010", "0.010", "0.100", "0.100"]
    assert [text.split()[0] for text in b4[1:5]] == ["0.110", "0.110", "0.000", "0.000"]
    assert ours[5].startswith("1.500 (")  # the median of 1 and 2
    ((against, ahead, behind, far_behind, lead, worst, *_),) = duels.rows
    assert (against, ahead, behind, far_behind, worst) == ("b4", "1", "1", "1", "-0.100")
    assert lead.startswith("0.000 (")


def test_cells_of_d_alone_have_tables_of_their_own_and_incomplete_ones_none() -> None:
    rows = make_rows(
        [
            (True, 1.0, {"ours": (1.0, 1.0), "b4": (1.0, 1.0)}),
            (False, 1.0, {"ours": (0.9, 1.0), "b4": (0.9, 1.0)}),
            (False, 1.0, {"ours": (0.1, 1.0)}),
        ]
    )
    titles = [table.title for table in compare_unseen(rows, ["ours", "b4"])]
    assert [title.split(":")[0] for title in titles] == [
        *["1 unseen cells, full cost"] * 2,
        *["1 unseen cells, D alone"] * 2,
    ]


def test_the_sum_counts_the_cells_in_which_another_policy_has_more_on_time() -> None:
    rows = make_rows(
        [
            (True, 1.0, {"ours": (0.995, 1.0), "b4": (1.0, 2.0)}),
            (False, 1.0, {"ours": (0.90, 3.0), "b4": (0.99, 1.0)}),
            (False, 1.0, {"ours": (0.70, 1.0), "b4": (0.68, 1.0)}),
        ]
    )
    on_time, latencies = sum_up_unseen(rows, ["ours", "b4"])
    assert on_time.title == "3 unseen cells: requests on time"
    ours, b4 = on_time.to_records()
    assert [ours[name] for name in ("cells behind by over 0.01", "by over 0.03")] == ["1", "1"]
    assert [b4[name] for name in ("cells behind by over 0.01", "by over 0.03")] == ["1", "0"]
    gaps = [ours[f"gap, {name} (1)"].split()[0] for name in ("bound near", "bound far", "D alone")]
    assert gaps == ["0.100", "0.000", "0.005"]
    assert latencies.to_records()[0]["mean over the shortest"].startswith("1.000 (")


def test_latencies_are_compared_with_the_policy_that_has_the_most_on_time_and_with_the_shortest() -> None:
    cell = {"ours": (0.90, 4.0), "b4": (0.80, 2.0), "b6": (0.50, 1.0)}
    _, latencies = sum_up_unseen(make_rows([(False, 1.0, cell)]), list(cell))
    ours, b4, _ = latencies.to_records()
    ratios = [f"{figure} over {other}" for figure in ("mean", "P95") for other in ("the rival's", "the shortest")]
    assert [ours[ratio].split()[0] for ratio in ratios] == ["2.000", "4.000"] * 2
    assert [b4[ratio].split()[0] for ratio in ratios] == ["0.500", "2.000"] * 2


def test_all_policies_of_a_cell_meet_the_same_trace() -> None:
    cells = list(list_unseen_cells(1, range(3), ["default", "b4"], SETTINGS))
    assert [(cell.index, cell.policy) for cell in cells[:3]] == [(0, "default"), (0, "b4"), (1, "default")]
    assert cells[0].trace_seed == cells[1].trace_seed != cells[2].trace_seed
    assert cells[0].model == "+".join(part.model for part in draw_cell(1, 0).models)


def test_the_command_draws_cells_and_compares_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traces.workloads.unseen._FEWEST_JUDGED", 20)
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


def test_a_table_keeps_cells_from_run_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traces.workloads.unseen._FEWEST_JUDGED", 20)
    monkeypatch.setattr("traces.workloads.unseen._FEWEST", 12)
    monkeypatch.setattr("traces.workloads.unseen._LENGTH", 1)
    path = tmp_path / "new" / "cells.csv"
    options = ["--unseen", "2", "--seed", "5", "--jobs", "1", "--table", str(path)]
    assert main([*options, "--policies", "segments", "b4", "--cells", "0"]) == 0
    first = path.read_text()
    assert [row.key for row in read_rows(path, UnseenRow)] == [(5, 0, "b4"), (5, 0, "segments")]
    monkeypatch.setattr("lib.evaluate.runner.run_cell", None)  # whatever the table has is not run again
    assert main([*options, "--policies", "segments", "b4", "--cells", "0"]) == 0
    assert path.read_text() == first
    plots = [line.removeprefix("plot: ") for line in capsys.readouterr().out.splitlines() if line.startswith("plot: ")]
    assert {Path(plot).name for plot in plots} == {"cells-on-time.png", "cells-latency.png"}
    assert all(Path(plot).read_bytes().startswith(b"\x89PNG") for plot in plots)


def test_a_table_of_other_cells_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cells.csv"
    options = ["--unseen", "2", "--seed", "5", "--policies", "b4", "--table", str(path)]
    (cell,) = list_unseen_cells(5, [0], ["b4"], SETTINGS)
    drawn = json.dumps({"diffuse_only": False, "load": 0.1, "pattern": "recorded"})
    KeptTable(path, UnseenRow, SETTINGS).add(cell, made(cell, parameters=drawn))
    assert main(options) == 2
    assert "has another cell 5-0 than is asked for" in capsys.readouterr().err
    path.write_text("a,b\n1,2\n")
    assert main(options) == 2
    assert "is no table of such cells: its columns are not seed, index, policy" in capsys.readouterr().err


def test_a_recorded_trace_that_cannot_be_read_is_refused_before_any_cell_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "absent.csv"
    assert main(["--unseen", "2", "--seed", "5", "--out", str(tmp_path), "--recorded", str(path)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert f"cannot read the trace {path}" in said.err


def test_the_rows_of_a_table_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    table = KeptTable(path, UnseenRow, SETTINGS)
    for index, mean_s in enumerate((2.0, 1 / 3)):
        cell = Cell("flux.1-dev", UNSEEN, 1.0, 7, "b4", index)
        parameters = json.dumps({"diffuse_only": index == 1, "load": 1.0, "pattern": "poisson"})
        table.add(cell, made(cell, 1.0, mean_s, parameters=parameters, unfinished=index, version="5e95655"))
    assert read_rows(path, UnseenRow) == table.rows
    assert [row.mean_s for row in table.rows] == [2.0, 0.333333]
