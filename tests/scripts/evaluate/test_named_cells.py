"""Workloads by name in a CSV file: what is kept, what is compared, and the loads that can be asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from evaluate import main
from lib.evaluate.cells import Cell, NamedLoad, Settings
from lib.evaluate.kept.kept_table import read_rows
from lib.evaluate.named_cells import NamedRow, compare_named
from lib.evaluate.scenes import run_cell

from tests.scripts.evaluate.results import SETTINGS, cell, made

SMALL = ["--models", "flux.1-dev", "--gpus", "8", "--duration-s", "10", "--jobs", "1"]
EVEN = json.dumps({"arrivals": "own", "rate_scale": 1.0})


def make_rows(*figures: tuple[Cell, float, float], parameters: str = EVEN) -> list[NamedRow]:
    return [NamedRow.from_result(of, made(of, share, mean_s, parameters=parameters)) for of, share, mean_s in figures]


def test_the_default_and_the_papers_policy_are_each_compared_with_the_baselines() -> None:
    rows = make_rows((cell(), 0.9, 2.0), (cell("b1"), 0.3, 8.0), (cell("tridentserve-paper"), 0.6, 4.0))
    all_policies, ours, papers = compare_named(rows)
    assert all_policies.title == "All policies, 8 GPUs, 60 s of even arrivals"
    assert [row["policy"] for row in all_policies.to_records()] == ["default", "tridentserve-paper", "b1"]
    assert [row["on time"] for row in all_policies.to_records()] == ["0.900", "0.600", "0.300"]
    assert [row["P95 over the default's"] for row in all_policies.to_records()] == ["1.00", "2.00", "4.00"]
    assert ours.title == "default over each baseline, 8 GPUs, 60 s of even arrivals"
    assert [row["over"] for row in ours.to_records()] == ["b1"]
    assert ours.to_records()[0]["on-time ratio"] == "3.00 / 3.00 / 3.00"
    assert ours.to_records()[0]["P95 ratio"] == "4.00 / 4.00 / 4.00"
    assert papers.to_records()[0]["on-time ratio"] == "2.00 / 2.00 / 2.00"
    assert papers.to_records()[0]["in the paper"] == "2.1 to 6.6"


def test_other_loads_are_compared_apart() -> None:
    figures = [(cell(), 0.9, 2.0), (cell("b1"), 0.3, 8.0)]
    bursts = json.dumps({"arrivals": "poisson", "rate_scale": 1.5})
    titles = [table.title for table in compare_named(make_rows(*figures) + make_rows(*figures, parameters=bursts))]
    assert titles == [
        "All policies, 8 GPUs, 60 s of even arrivals",
        "default over each baseline, 8 GPUs, 60 s of even arrivals",
        "All policies, 8 GPUs, 60 s of poisson arrivals, 1.5 times the rate",
        "default over each baseline, 8 GPUs, 60 s of poisson arrivals, 1.5 times the rate",
    ]


def test_the_command_keeps_each_load_and_adds_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cells.csv"
    options = [*SMALL, "--workloads", "light", "proprietary", "--policies", "default", "b3", "--table", str(path)]
    assert main(options) == 0
    even = read_rows(path, NamedRow)
    assert {(row.workload, row.policy, row.arrivals) for row in even} == {
        (workload, policy, "own") for workload in ("light", "proprietary") for policy in ("default", "b3")
    }
    assert main([*options, "--arrivals", "poisson", "--rate-scale", "1.5"]) == 0
    rows = read_rows(path, NamedRow)
    assert [row for row in rows if row.arrivals == "own"] == even
    assert len(rows) == 2 * len(even)
    monkeypatch.setattr("lib.evaluate.runner.run_cell", None)  # whatever the table has is not run again
    capsys.readouterr()
    assert main(options) == 0
    shown = capsys.readouterr().out
    assert "default over each baseline, 8 GPUs, 10 s of poisson arrivals, 1.5 times the rate" in shown
    last = json.loads(shown.splitlines()[-1])
    assert (last["cells"], last["finished"]) == (4, 4)


def test_poisson_arrivals_are_of_the_same_rate_and_leave_the_diurnal_workload_alone() -> None:
    def count(workload: str, settings: Settings) -> int:
        return int(run_cell(Cell("flux.1-dev", workload, 1.0, 0, "b3"), settings).row["requests"])

    even, poisson = replace(SETTINGS, gpus=128), replace(SETTINGS, gpus=128, named_load=NamedLoad("poisson"))
    assert count("light", even) == 90
    assert count("light", poisson) != 90
    assert 60 <= count("light", poisson) <= 120
    assert count("light", replace(even, named_load=NamedLoad(rate_scale=2.0))) == 180
    assert count("proprietary", even) == count("proprietary", poisson) == 90


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--unseen", "1", "--seed", "1", "--arrivals", "poisson"], "are of workloads by name"),
        (["--related", "--rate-scale", "2"], "are of workloads by name"),
        (["--shift", "--arrivals", "poisson"], "are of workloads by name"),
        (["--related", "--table", "x.csv"], "do not give --related"),
    ],
)
def test_loads_that_have_their_own_arrivals_take_no_others(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
