"""The profiler on a tiny pipeline: real times, real memory, a table that planning can use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from profiler import CostModel, read_table
from profiler.measure import MeasureOptions, Point, measure, points
from profiler.measure_memory import peak_bytes
from profiler.measure_stages import Sample, Source
from tridentserve.errors import CheckpointError, ProfileError
from tridentserve.pipelines import ensure_tiny
from tridentserve.requests import Shape
from tridentserve.stages import Stage

CPU = torch.device("cpu")
ONCE = MeasureOptions(repeats=1)


@pytest.fixture(scope="module")
def folder(tiny_cache: Path) -> Path:
    return ensure_tiny("sd3", tiny_cache)


def test_memory_is_counted_while_it_lives() -> None:
    x = torch.zeros(1000)  # 4000 bytes

    def two_at_once() -> torch.Tensor:
        doubled = x * 2
        shifted = doubled + 1
        del doubled
        return (shifted[10:].view(-1) * 2).add_(1)  # a view and an in-place change are no new memory

    assert peak_bytes(two_at_once, {"x": x}, CPU) == 4000 + 2 * 4000
    chain = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000, bias=False) for _ in range(4)))
    with torch.no_grad():
        assert peak_bytes(lambda: chain(x), {}, CPU) == 2 * 4000  # weights and unlisted inputs are not counted


def test_a_model_is_measured_at_every_size_and_degree(folder: Path) -> None:
    shapes, heard = [Shape(64, 64), Shape(128, 96)], list[tuple[Point, Sample]]()
    options = MeasureOptions(repeats=2, passes=2)
    table = measure(Source(folder, "cpu"), "m", shapes, [1, 2], options, lambda *point: heard.append(point))
    assert [(row.stage, row.shape, row.degree) for row in table.rows] == points(shapes, [1, 2])
    assert len(heard) == 2 * len(table.rows)
    for row in table.rows:
        seconds = [sample.seconds for point, sample in heard if point == (row.stage, row.shape, row.degree)]
        assert row.seconds == min(seconds)
    times = CostModel([table], "cpu")
    assert times.degrees("m", Stage.DIFFUSE) == (1, 2)
    assert times.peak_bytes("m", Stage.DECODE, shapes[1]) > 2 * times.peak_bytes("m", Stage.DECODE, shapes[0])
    assert times.weights_bytes("m", Stage.DIFFUSE) > 10_000
    assert times.seconds("m", Stage.ENCODE, shapes[0]) > 0


def test_what_cannot_be_measured_is_named(folder: Path, tmp_path: Path) -> None:
    source = Source(folder, "cpu")
    with pytest.raises(ProfileError, match="sd3 makes no 72x64: both sides must be multiples of 16"):
        measure(source, "m", [Shape(64, 72)], [1], ONCE)
    with pytest.raises(ProfileError, match="nothing to measure"):
        measure(source, "m", [Shape(64, 64)], [], ONCE)
    with pytest.raises(ProfileError, match="they must be powers of two"):
        measure(source, "m", [Shape(64, 64)], [3], ONCE)
    with pytest.raises(ProfileError, match="4 attention heads cannot be shared by 8 workers"):
        measure(source, "m", [Shape(64, 64)], [2, 8], ONCE)
    with pytest.raises(CheckpointError, match=r"model_index.json is missing"):
        measure(Source(tmp_path, "cpu"), "m", [Shape(64, 64)], [1], ONCE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_degrees_need_gpus(folder: Path) -> None:
    with pytest.raises(ProfileError, match="degree 2 needs as many GPUs; there are 0"):
        measure(Source(folder, "cuda"), "m", [Shape(64, 64)], [2], ONCE)


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).parents[2] / "scripts" / "profile_model.py"
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)


def test_the_script_writes_a_table(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "mine.csv"
    arguments = ("--sizes", "64,96x64", "--degrees", "1", "--steps-per-point", "1", "--name", "mine")
    done = run_script(str(folder), *arguments, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}: 6 points of mine\n"
    table = read_table(out)
    assert {(row.model, row.gpu) for row in table.rows} == {("mine", "cpu")}
    assert {row.shape for row in table.rows} == {Shape(64, 64), Shape(64, 96)}


def test_the_script_says_what_is_wrong(tmp_path: Path) -> None:
    done = run_script(str(tmp_path), "--out", str(tmp_path / "t.csv"))
    assert done.returncode == 1
    assert "profile_model: " in done.stderr
    assert "model_index.json is missing" in done.stderr
    assert not (tmp_path / "t.csv").exists()
