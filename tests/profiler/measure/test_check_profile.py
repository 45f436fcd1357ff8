"""`scripts/check_profile.py`: a table against what other sizes take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import check_profile
import pytest

from profiler import ProfileRow, ProfileTable, WeightsRow, write_table
from profiler.measure.checks import Sweep
from profiler.measure.run import MeasureOptions
from profiler.measure.stages import Source
from tridentserve.requests import Shape
from tridentserve.stages import Stage


def make_rows(sizes: Sequence[Shape], seconds_per_token: float) -> tuple[ProfileRow, ...]:
    return tuple(
        ProfileRow("m", "cpu", stage, shape, 1, 1, seconds_per_token * shape.tokens, 1, "measured: here")
        for stage in Stage
        for shape in sizes
    )


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.2, 0), (1.3, 1)])
def test_the_status_says_whether_the_table_is_good(
    factor: float,
    status: int,
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(source: Source, name: str, sweep: Sweep, options: MeasureOptions) -> ProfileTable:
        return ProfileTable(name, make_rows(sweep.shapes, 0.001), ())

    monkeypatch.setattr(check_profile, "measure", measure)
    weights = tuple(WeightsRow("m", stage, 1, "measured: here") for stage in Stage)
    rows = make_rows([Shape(64, 64), Shape(128, 128), Shape(256, 256)], 0.001 * factor)
    write_table(tmp_path / "own.csv", ProfileTable("own", rows, weights))
    command = [str(tmp_path / "own.csv"), "tiny-sd3", "--name", "m", "--sizes", "96,192"]
    assert check_profile.main([*command, "--cache-dir", str(tiny_cache)]) == status
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["worst_percent"] == pytest.approx(100 * (factor - 1), abs=0.1)
    assert set(found["errors_percent"]) == {f"{stage} {size}" for stage in Stage for size in ("96x96", "192x192")}
    assert check_profile.main([*command[:-1], "1024", "--cache-dir", str(tiny_cache)]) == 1
    assert "1024x1024 is outside the profiled sizes" in capsys.readouterr().err
