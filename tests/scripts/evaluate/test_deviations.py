"""The table of deviations: what is compared with what, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluate import main
from lib.evaluate.cells import UNSEEN, Cell
from lib.evaluate.unseen_cells.cell_table import UnseenRow
from lib.evaluate.unseen_cells.deviations import DEVIATION_POLICIES, make_deviations_table

from dispatch.policies.paper.deviations import NAMES
from tests.scripts.evaluate.results import made

PAPER, DEFAULT = DEVIATION_POLICIES[:2]


def rows_of(*cells: dict[str, tuple[float, float]]) -> list[UnseenRow]:
    """The share on time and the mean latency of some policies in each cell; of the others 0.5 and 10 s."""
    found = []
    parameters = json.dumps({"diffuse_only": False, "load": 1.0, "pattern": "poisson"})
    for index, figures in enumerate(cells):
        for policy in DEVIATION_POLICIES:
            cell = Cell("m", UNSEEN, 1.0, 7, policy, index)
            attainment, mean_s = figures.get(policy, (0.5, 10.0))
            found.append(UnseenRow.from_result(cell, made(cell, attainment, mean_s, parameters=parameters)))
    return found


def test_each_deviation_has_what_it_gains_and_what_the_default_loses_without_it() -> None:
    rows_by_cell = rows_of(
        {PAPER: (0.4, 20.0), DEFAULT: (0.9, 5.0), f"{PAPER}+values": (0.6, 10.0), f"{PAPER}+all-values": (0.8, 4.0)},
        {PAPER: (0.4, 20.0), DEFAULT: (0.8, 10.0), f"{PAPER}+values": (0.5, 20.0), f"{PAPER}+all-values": (0.8, 10.0)},
    )
    table = make_deviations_table(rows_by_cell)
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == ["all of them", *(f"`{name}`" for name in NAMES)]
    assert rows["all of them"][0].startswith("0.450 (0.400 to 0.500)")
    gained, ratio, most, least, lost, lost_ratio, lost_least = rows["`values`"]
    assert (gained[:5], ratio[:5]) == ("0.150", "0.750")
    assert (most, least) == ("+0.200: 7-0 (m, 8 GPUs)", "+0.100: 7-1 (m, 8 GPUs)")
    assert (lost[:5], lost_ratio[:5], lost_least) == ("0.050", "1.125", "+0.000: 7-1 (m, 8 GPUs)")


def test_cells_without_all_policies_do_not_count() -> None:
    whole = rows_of({}, {})
    incomplete = [row for row in whole if row.key != (7, 1, DEFAULT)]
    assert len(incomplete) == len(whole) - 1
    assert make_deviations_table(incomplete).title == "1 unseen cells: each deviation from the paper"
    assert make_deviations_table([]).rows[0][1] == "-"


@pytest.mark.parametrize("kept", [["--out", "cells"], ["--table", "cells.csv"]])
def test_the_command_runs_them_all(
    kept: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("traces.workloads.unseen._FEWEST_JUDGED", 1)
    monkeypatch.setattr("traces.workloads.unseen._FEWEST", 6)
    monkeypatch.setattr("traces.workloads.unseen._LENGTH", 0.1)
    options = ["--unseen", "11", "--cells", "10", "--seed", "7", "--deviations", "--jobs", "1"]
    assert main([*options, *kept]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["finished"] == len(DEVIATION_POLICIES) == 2 + 2 * len(NAMES)
    assert [row["deviation"] for row in last["rows"]] == ["all of them", *(f"`{name}`" for name in NAMES)]
    assert {len(row) for row in last["rows"]} == {8}
    assert [path.name for path in tmp_path.iterdir()] == [kept[1]]


@pytest.mark.parametrize("options", [["--deviations"], ["--unseen", "2", "--seed", "7", "--cells", "2"]])
def test_wrong_usage_is_one_line(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(options)
    assert "--cells" in capsys.readouterr().err
