"""Attention kernels and compilation are compared by turns, on the same weights."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiler.measure.kernels import STOCK, Timing, compare_kernels, compute_ratios, compute_spread
from profiler.measure.stages import Source, load_stage
from profiler.measure.stock import StockPipeline
from tridentserve.errors import ProfileError
from tridentserve.models.kernels import Kernels
from tridentserve.pipelines import kernels
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.pipelines.weights import named_tensors
from tridentserve.requests import Shape
from tridentserve.stages import Stage

SCRIPT = Path(__file__).parents[3] / "scripts" / "compare_kernels.py"


def test_ratios_are_of_the_same_round() -> None:
    stock, other = Timing(STOCK, seconds=[1.0, 2.0, 4.0]), Timing(Kernels("math"), seconds=[2.0, 3.0, 4.0])
    assert compute_ratios(other, stock) == [2.0, 1.5, 1.0]
    assert compute_spread(compute_ratios(other, stock)) == (1.5, 1.0, 2.0)
    assert compute_spread([3.0]) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize("random_weights", [False, True])
def test_each_way_is_timed_or_its_reason_reported(tiny_cache: Path, random_weights: bool) -> None:
    source = Source(ensure_tiny("sd3", tiny_cache), "cpu", random_weights=random_weights)
    ways = [Kernels(attention) for attention in ("math", "sdpa", "cudnn")]
    found = dict(compare_kernels(source, [Shape(64, 64), Shape(64, 96)], ways, rounds=3, steps_per_round=2))
    assert list(found) == [Shape(64, 64), Shape(64, 96)]
    for stock, math, cudnn in found.values():
        assert (stock.kernels, math.kernels.attention, cudnn.kernels.attention) == (STOCK, "math", "cudnn")
        assert len(stock.seconds) == len(math.seconds) == 3
        assert min(stock.first_step_s, math.first_step_s, *stock.seconds, *math.seconds) > 0
        assert stock.difference == 0
        assert stock.peak_bytes
        assert math.peak_bytes
        assert math.peak_bytes > stock.peak_bytes, "`math` keeps the scores of all pairs of tokens"
        assert cudnn.peak_bytes is None
        assert 0 <= math.difference < 1e-5, "the same weights, the same request"
        assert cudnn.error.startswith("the attention kernel 'cudnn' cannot compute the attention of sd3 here")
        assert not cudnn.seconds


def test_a_model_that_cannot_take_a_step_is_an_error(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("diffusers.SD3Transformer2DModel.forward", forward)
    source = Source(ensure_tiny("sd3", tiny_cache), "cpu")
    with pytest.raises(RuntimeError, match="a defect"):
        next(compare_kernels(source, [Shape(64, 64)], [Kernels("math")], rounds=1))


@pytest.mark.parametrize("family", ["sd3", "flux", "qwen_image", "wan", "hunyuan_video"])
def test_the_stock_pipeline_takes_the_same_steps(tiny_cache: Path, family: str) -> None:
    """Its denoising models are diffusers' own, on the adapter's tensors: they are called as often, and no tensor is
    made anew."""
    source = Source(ensure_tiny(family, tiny_cache), "cpu")
    stock_s: dict[Shape, list[float]] = {}
    (timings,) = [
        timings for _, timings in compare_kernels(source, [Shape(64, 64)], [STOCK], 2, 1, stock_s.__setitem__)
    ]
    assert len(timings[0].seconds) == 2
    (seconds,) = stock_s.values()
    assert len(seconds) == 4, "two before and two after"
    assert min(seconds) > 0
    denoiser = load_stage(source, Stage.DIFFUSE)
    pipeline: Any = StockPipeline(source, denoiser)
    stock: Any = SimpleNamespace(pipe=pipeline._pipe, is_rebuilt=False)
    ours, theirs = named_tensors(denoiser), named_tensors(stock)
    assert {name: tensor.data_ptr() for name, tensor in ours.items()}.items() <= {
        name: tensor.data_ptr() for name, tensor in theirs.items()
    }.items()
    assert not [name for name in ours if theirs[name].is_meta]


def test_a_stock_pipeline_that_starts_from_an_image_is_refused(tiny_cache: Path) -> None:
    source = Source(ensure_tiny("wan_i2v", tiny_cache), "cpu")
    with pytest.raises(ProfileError, match="wan_i2v starts from an image"):
        StockPipeline(source, load_stage(source, Stage.DIFFUSE))


def run(*arguments: str) -> int:
    status: int = runpy.run_path(str(SCRIPT))["main"](list(arguments))
    return status


def test_the_script_tells_ratios_and_ends_with_json(capsys: pytest.CaptureFixture[str], tiny_cache: Path) -> None:
    options = ["tiny-flux", "--sizes", "64,96x64", "--rounds", "3", "--attention", "flash,math,cudnn"]
    assert run(*options, "--without-compile", "--cache-dir", str(tiny_cache)) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    result: dict[str, Any] = json.loads(last)
    assert lines[:2] == [f"machine: {result['machine']}", f"command: {result['command']}"]
    assert result["model"] == "tiny-flux"
    assert list(result["sizes"]) == ["64x64", "96x64"]
    for rows in result["sizes"].values():
        assert [row["attention"] for row in rows] == ["sdpa", "flash", "cudnn", "math"]
        assert rows[0]["ratio"] == [1.0, 1.0, 1.0]
        for row in rows[1], rows[3]:
            median, lowest, highest = row["ratio"]
            assert 0 < lowest <= median <= highest
        assert "cannot compute" in rows[2]["error"]
    printed = [line.split() for line in lines if line.startswith(("sdpa", "flash", "math"))]
    assert [float(row[3]) for row in printed[:1]] == [1.0]
    assert len(printed) == 6


@pytest.mark.slow
def test_compiled_ways_are_measured_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_cache: Path
) -> None:
    """Traced as for the compiler, whose own work (minutes on a small CPU) is left out."""
    traced: list[object] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> Callable[..., object]:
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(kernels, "_make_backend", lambda attention: backend)
    options = ["tiny-sd3", "--sizes", "64", "--rounds", "1", "--attention", "sdpa,math"]
    assert run(*options, "--cache-dir", str(tiny_cache)) == 0
    (rows,) = json.loads(capsys.readouterr().out.splitlines()[-1])["sizes"].values()
    assert [(row["attention"], row["compiled"]) for row in rows] == [
        ("sdpa", False),
        ("math", False),
        ("sdpa", True),
        ("math", True),
    ]
    assert max(row["difference"] for row in rows) < 1e-5
    assert [row["peak_bytes"] is None for row in rows] == [False, False, True, True], "on a CPU"
    assert traced


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flux.1-dev"], "--random-weights makes the published model of that name"),
        (["tiny-sd3", "--blocks", "2"], "--blocks is for published models with --random-weights"),
        (["tiny-sd3", "--attention", "fast"], "'fast' must be some of sdpa,flash"),
        (["tiny-sd3", "--rounds", "0"], "'0' is not a whole number above 0"),
    ],
)
def test_bad_usage_is_status_2(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_size_that_the_model_does_not_make_is_status_1(capsys: pytest.CaptureFixture[str], tiny_cache: Path) -> None:
    assert run("tiny-sd3", "--sizes", "72", "--cache-dir", str(tiny_cache)) == 1
    assert "sd3 makes no 72x72" in capsys.readouterr().err
