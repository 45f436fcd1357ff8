"""plan.py --attainment: the search finds the smallest size, and the command says what it tried."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lib.sizing import Trial, find_smallest

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "deployments" / "clusters" / "l20-8.yaml"
main = runpy.run_path(str(ROOT / "scripts" / "plan.py"))["main"]


@given(needed=st.integers(1, 400), first=st.integers(0, 500), most=st.integers(1, 300))
def test_the_search_finds_the_smallest_that_is_enough(needed: int, first: int, most: int) -> None:
    tried: list[int] = []

    def try_nodes(nodes: int) -> Trial:
        tried.append(nodes)
        return Trial(nodes, min(1.0, nodes / needed))

    trials = find_smallest(1.0, first, most, try_nodes)
    assert [trial.nodes for trial in trials] == tried
    assert len(set(tried)) == len(tried) <= 2 * most.bit_length() + 2
    assert max(tried) <= most
    reached = [trial.nodes for trial in trials if trial.attainment >= 1.0]
    if needed > most:
        assert not reached
        assert most in tried
    else:
        assert min(reached) == needed


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    short = ["--duration-s", "20"] if "--attainment" in arguments else []
    status = main(["--cluster", str(CLUSTER), *short, *arguments])
    written = capsys.readouterr()
    return status, written.out.splitlines(), written.err


def test_the_answer_is_the_smallest_row_that_reaches_it(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--workload", "sd3-medium-light", "--rate", "6", "--attainment", "0.9")
    assert status == 0
    assert lines[0] == "sd3-medium-light: 6 requests/s of sd3-medium for 20 s, policy default"
    rows = [line.split() for line in lines[3:] if line and line.split()[0].isdigit() and "%" in line][:-1]
    reached = [int(row[0]) for row in rows if float(row[3].rstrip("%")) >= 90.0]
    below = [int(row[0]) for row in rows if float(row[3].rstrip("%")) < 90.0]
    answer = int(lines[-1].split()[0])
    assert answer == min(reached)
    assert answer == 8 or answer - 8 in below
    assert lines[-1].endswith("are enough for 90.0% on time at 6 requests/s.")


def test_what_is_never_reached_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", "sd3-medium-light", "--rate", "12", "--attainment", "1", "--max-gpus", "8"]
    status, lines, _ = run(capsys, *arguments)
    assert status == 1
    assert lines[-1].startswith("Not reached: 100.0% on time at 12 requests/s needs more than 8 GPUs")


def test_the_rate_changes_the_plan_too(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--workload", "sd3-medium-light", "--rate", "0.25")
    assert status == 0
    assert lines[0] == "sd3-medium-light: 0.25 requests/s of sd3-medium"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attainment", "0.9", "--max-gpus", "4"], "--max-gpus is 4, and one node has 8"),
        (["--attainment", "0.9", "--policy", "best"], "'best' is no policy; use one of default, b1,"),
        (["--workload", "genserve", "--attainment", "0.9", "--rate", "0.001"], "no request comes in 20 s at 0.001/s"),
        (["--attainment", "1.5"], "is no share"),
        (["--rate", "0"], "invalid positive number value: '0'"),
    ],
)
def test_bad_questions_are_exit_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        status, _, errors = run(capsys, "--workload", "sd3-medium-light", *arguments)
    except SystemExit as exit_:
        status, errors = int(exit_.code or 0), capsys.readouterr().err
    assert status == 2
    assert message in errors
