"""scripts/evaluate.py from the command line, on small clusters and short traces."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from evaluate import main

from dispatch import DispatchOptions
from tests.support.processes import run, started
from tests.support.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[3]
SMALL = ["--models", "flux.1-dev", "--gpus", "8", "--duration-s", "30", "--workloads", "light", "--jobs", "1"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / "evaluate.py"), *arguments]


def evaluate(folder: Path, *arguments: str) -> CompletedProcess[str]:
    return run(command(*arguments), folder)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_grid_its_report_and_a_rerun_that_has_nothing_to_do(tmp_path: Path) -> None:
    options = [*SMALL, "--policies", "default", "b3", "--slo-scales", "0.5", "1", "--out", "out", "--markdown", "e.md"]
    done = evaluate(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "out" / "results.csv")
    assert [(row["policy"], row["slo_scale"]) for row in rows] == [
        *[("b3", "0.5"), ("default", "0.5")],
        *[("b3", "1.0"), ("default", "1.0")],
    ]
    for row in rows:
        assert 0 <= float(row["slo_attainment"]) <= float(row["bound_attainment"]) <= 1
        assert row["command"].startswith("python scripts/evaluate.py --models flux.1-dev")
        assert json.loads(row["options"])["dispatch.time_limit_s"] == DispatchOptions().time_limit_s
    assert "options: as shipped" in done.stdout
    assert f"dispatch.time_limit_s {DispatchOptions().time_limit_s}, " in (tmp_path / "e.md").read_text()
    assert len({row["requests"] for row in rows}) == 1
    assert all(float(row["slo_attainment"]) > 0 for row in rows if row["policy"] == "default")
    report = (tmp_path / "out" / "report.html").read_text()
    figures = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    expected = {"baselines-flux.1-dev", "timeline-flux.1-dev", "cdf-flux.1-dev", "sweep-flux.1-dev-light"}
    assert figures == expected
    assert report.count("data:image/png;base64,") == len(expected)
    assert "| flux.1-dev | light | 1 | default | 1 |" in (tmp_path / "e.md").read_text()

    kept = (tmp_path / "out" / "cells.jsonl").read_bytes()
    again = evaluate(tmp_path, *options)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "out" / "cells.jsonl").read_bytes() == kept


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    for out in ("one", "two"):
        done = evaluate(tmp_path, *SMALL, "--policies", "edf", "--seeds", "2", "--out", out)
        assert done.returncode == 0, done.stderr
    one, two = (rows_of(tmp_path / out / "results.csv") for out in ("one", "two"))
    for row in (*one, *two):
        for timed in ("wall_s", "solve_mean_ms", "command"):
            del row[timed]
    assert one == two
    assert one[0]["mean_s"] != one[1]["mean_s"], "another seed is another trace"


def test_help_imports_no_pandas_and_no_matplotlib(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); from evaluate import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: sys.exit(','.join({'pandas', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    done = run([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--slo-scales" in done.stdout


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--gpus", "12"], "--gpus is 12; it must be a multiple of 8"),
        (["--cluster", str(ROOT / "deployments/clusters/l20-128.yaml")], "has 128 GPUs, not 8; set --gpus 128"),
        (["--workloads", "sunny"], "invalid choice: 'sunny'"),
        (["--slo-scales", "0"], "invalid positive number value: '0'"),
    ],
)
def test_bad_usage_is_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    try:
        status = main([*SMALL, *options, "--policies", "edf", "--out", str(tmp_path / "out")])
    except SystemExit as ended:  # argparse's way
        status = int(ended.code or 0)
    assert status == 2
    assert expected in capsys.readouterr().err


def test_a_profile_that_does_not_exist_fails_its_cells(tmp_path: Path) -> None:
    done = evaluate(tmp_path, *SMALL, "--profiles", "h900", "--policies", "edf", "--out", "out")
    assert done.returncode == 1
    assert "'h900'" in done.stderr
    assert "no cell has a result" in done.stderr


def test_other_settings_are_not_mixed_into_a_directory(tmp_path: Path) -> None:
    assert evaluate(tmp_path, *SMALL, "--policies", "edf", "--out", "out").returncode == 0
    done = evaluate(tmp_path, *SMALL, "--duration-s", "20", "--policies", "edf", "--out", "out")
    assert done.returncode == 2
    assert "holds results of other settings" in done.stderr


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    options = [*SMALL, "--duration-s", "60", "--jobs", "2", "--policies", "edf", "b3", "--seeds", "500", "--out", "out"]
    kept = tmp_path / "out" / "cells.jsonl"
    with started(command(*options), tmp_path) as process:
        wait_until(lambda: kept.exists() and bool(kept.read_text()), "the first cell is finished")
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "the same command resumes from here" in stderr
    assert "Traceback" not in stderr
    finished = [json.loads(line)["cell"] for line in kept.read_text().splitlines()]
    assert 1 <= len(finished) < 1000
    assert len(rows_of(tmp_path / "out" / "results.csv")) == len(finished)


def test_a_termination_ends_all_processes(tmp_path: Path) -> None:
    """SIGTERM reaches the first process alone, unlike Ctrl-C. The others hold its pipes until they end."""
    options = [*SMALL, "--duration-s", "60", "--jobs", "2", "--policies", "edf", "b3", "--seeds", "500", "--out", "out"]
    kept = tmp_path / "out" / "cells.jsonl"
    with started(command(*options), tmp_path) as process:
        wait_until(lambda: kept.exists() and bool(kept.read_text()), "the first cell is finished")
        process.terminate()
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in stderr
    assert 1 <= len(kept.read_text().splitlines()) < 1000
