"""scripts/bench_overhead.py refuses options that cannot be measured before it starts anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes import run

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--runs", "0"], "argument --runs: '0' is not a whole number above 0"),
        (["--side", "100"], "no size is left: sides are multiples of 16"),
        (["--side", "4096"], "4096x4096 is outside the profiled sizes"),
    ],
)
def test_options_that_cannot_be_measured(options: list[str], expected: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench_overhead.py"), *options]
    ended = run(command, ROOT)
    assert ended.returncode == 2
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr
