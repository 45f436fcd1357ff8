"""`evaluate.py --shift`: one table for each shift, with all ways to serve it."""

from __future__ import annotations

import json

import pytest
from evaluate import main
from lib.evaluate.shift import SHIFTS


def test_each_shift_is_served_in_all_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shift", "--models", "flux.1-dev", "--gpus", "16", "--duration-s", "240"]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(printed.splitlines()[-1])["rows"]
    assert {row["shift"] for row in rows} == {f"flux.1-dev, 16 GPUs: {name}" for name in SHIFTS}
    served = [row["served with"] for row in rows]
    assert served == [*served[:9]] * len(SHIFTS)
    follow = ["default", "splits that follow the load"]
    assert served[:3] == [follow[0], "wo-switch", follow[1]]
    assert served[-1] == "all stages on every worker"
    assert all(0 <= float(row["on time %"]) <= 100 for row in rows)
    for row in rows:
        if row["served with"] not in follow:
            assert float(row["switches"]) == 0, row


def test_a_quick_run_has_all_shifts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shift", "--quick"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len({row["shift"] for row in rows}) == len(SHIFTS)


def test_a_shift_without_requests_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shift", "--quick", "--models", "flux.1-dev"]) == 2
    assert "raise --duration-s or --gpus" in capsys.readouterr().err
