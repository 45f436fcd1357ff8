"""scripts/profile_model.py: what it writes, what it refuses, and what it keeps when it has to stop."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from profiler import CostModel, read_table
from profiler.measure.random_weights import write_published
from profiler.measure.stages import Sample, Source, sample_decode
from tests.pipelines.variants import edit_json
from tests.support.processes import run
from tridentserve.models.cache import CACHE_ENV
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

SCRIPT = Path(__file__).parents[3] / "scripts" / "profile_model.py"
QUICK = ("--degrees", "1", "--batches", "1", "--steps-per-point", "1")

Main = Callable[[list[str]], int]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tiny_cache: Path) -> Main:
    monkeypatch.setenv(CACHE_ENV, str(tiny_cache))
    function: Main = runpy.run_path(str(SCRIPT))["main"]
    return function


def fail_decode_above(width: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(source: Source, inputs: GenerationInputs, condition: bytes, repeats: int, batch: int) -> Sample:
        if inputs.shape.width > width:
            raise error
        return sample_decode(source, inputs, condition, repeats, batch)

    monkeypatch.setattr("profiler.measure.processes.sample_decode", decode)


def test_a_table_is_written_where_ray_is_not_installed(tiny_cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "mine.csv"
    (tmp_path / "ray.py").write_text("raise ImportError('no Ray on this machine')")
    command = [sys.executable, str(SCRIPT), str(ensure_tiny("sd3", tiny_cache)), *QUICK]
    command += ["--sizes", "64,96x64", "--name", "mine", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = run(command, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}: 6 points of mine\n"
    table = read_table(out)
    assert {(row.model, row.gpu) for row in table.rows} == {("mine", "cpu")}
    assert {row.shape for row in table.rows} == {Shape(64, 64), Shape(64, 96)}
    assert sorted(path.name for path in out.parent.iterdir()) == ["mine.csv", "mine.weights.csv"]


def test_several_models_go_into_one_table(main: Main, tiny_cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.csv"
    assert main(["tiny-sd3", "tiny-flux", "--sizes", "64,64", *QUICK, "--out", str(out)]) == 0
    assert CostModel([read_table(out)], "cpu").models == ("tiny-flux", "tiny-sd3")
    assert list(tiny_cache.glob("tiny-flux-*")), "the cache folder is that of $TRIDENTSERVE_CACHE"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (OSError("no space left"), 1), (ValueError("a bug"), None)],
)
def test_what_was_measured_is_kept_whatever_happens(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int | None
) -> None:
    fail_decode_above(64, error, monkeypatch)
    arguments = ["tiny-sd3", "--sizes", "64,96x64", *QUICK, "--out", str(tmp_path / "t.csv")]
    if status is None:
        with pytest.raises(ValueError, match="a bug"):
            main(arguments)
    else:
        assert main(arguments) == status
    assert len(read_table(tmp_path / "t.csv").rows) == 5
    assert CostModel([read_table(tmp_path / "t.csv")], "cpu").seconds("tiny-sd3", Stage.DECODE, Shape(64, 64)) > 0


def test_a_table_that_was_begun_is_gone_on_with(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With random weights, and batches: what is there is not measured again, and not under other settings."""
    out = tmp_path / "t.csv"
    arguments = ["--model", "tiny-sd3", "--random-weights", *QUICK, "--out", str(out)]
    assert main([*arguments, "--sizes", "64", "--batches", "1,2", "--stages", "encode,diffuse"]) == 0
    begun = read_table(out).rows
    assert [(row.stage, row.batch) for row in begun] == [(stage, n) for stage in list(Stage)[:2] for n in (1, 2)]
    assert all(", random weights; " in row.source for row in begun)
    assert main([*arguments, "--sizes", "64,96x64", "--resume"]) == 0
    resumed = read_table(out).rows
    assert resumed[: len(begun)] == begun
    assert len(resumed) == len(begun) + 4
    held = {(row.model, row.stage): row.output_bytes for row in read_table(out).weights}
    assert held["tiny-sd3", Stage.ENCODE] == 2 * (333 + 1) * 64 * 4
    assert main([*arguments, "--sizes", "64", "--resume", "--attention", "math"]) == 1
    assert "attention math" in capsys.readouterr().err
    assert read_table(out).rows == resumed


@pytest.mark.slow
def test_a_published_model_of_two_blocks_goes_the_whole_way(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SD3-medium in its real widths, 24 blocks cut to two, three layers of each CLIP and no T5 (2 GB in all): begun at
    one size, gone on with at another, into a table that planning takes."""
    folder = write_published("sd3-medium", tmp_path / "sd3-two-blocks", few_text_layers=True)
    edit_json(folder / "transformer" / "config.json", num_layers=2)
    edit_json(folder / "model_index.json", text_encoder_3=[None, None], tokenizer_3=[None, None])
    arguments = [str(folder), "--random-weights", *QUICK, "--out", str(tmp_path / "t.csv")]
    assert main([*arguments, "--sizes", "64"]) == 0
    begun = read_table(tmp_path / "t.csv").rows
    capsys.readouterr()
    assert main([*arguments, "--sizes", "64,128", "--resume"]) == 0
    table = read_table(tmp_path / "t.csv")
    assert (len(begun), table.rows[:3], len(table.rows)) == (3, begun, 6)
    assert "3/3" in capsys.readouterr().err, "the bar counts what is left"
    assert all(row.source.startswith("measured: ") and "random weights" in row.source for row in table.rows)
    times = CostModel([table], "cpu")
    for stage in Stage:
        assert times.seconds(folder.name, stage, Shape(128, 128)) > 0
    # The maps of 128 channels that the decoder holds grow with the pixels.
    small, large = (times.peak_bytes(folder.name, Stage.DECODE, Shape(side, side)) for side in (64, 128))
    assert 3 * small < large < 5 * small
    # Two blocks of 1536 wide and the embeddings, in four bytes each.
    assert 6e8 < times.weights_bytes(folder.name, Stage.DIFFUSE) < 12e8


def test_points_that_do_not_fit_are_skipped_and_reported(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_decode_above(64, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."), monkeypatch)
    # The tiny model has positions for 128 patches of 16 pixels.
    arguments = ["tiny-sd3", "--sizes", "2064x64,96x64,64", *QUICK, "--out", str(tmp_path / "t.csv")]
    assert main(arguments) == 3
    heard = capsys.readouterr()
    skipped = [line for line in heard.err.splitlines() if "skipped" in line]
    too_large = "the model makes no side above 2048 (pos_embed_max_size 128)"
    assert [line.partition("skipped ")[2] for line in skipped] == [
        *(f"tiny-sd3 {stage} 2064x64 degree 1: {too_large}" for stage in Stage),
        "tiny-sd3 decode 96x64 degree 1: out of memory (CUDA out of memory)",
    ]
    assert heard.out.endswith("5 points of tiny-sd3; 4 were skipped\n")
    assert len(read_table(tmp_path / "t.csv").rows) == 5


def test_a_model_without_a_whole_stage_is_status_1(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_decode_above(0, torch.OutOfMemoryError("CUDA out of memory."), monkeypatch)
    assert main(["tiny-sd3", "--sizes", "64", *QUICK, "--out", str(tmp_path / "t.csv")]) == 1
    assert "tiny-sd3 has no decode rows at degree 1" in capsys.readouterr().err


def test_every_model_is_looked_at_before_the_first_is_measured(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_cache: Path
) -> None:
    spoiled = Path(shutil.copytree(ensure_tiny("sd3", tiny_cache), tmp_path / "spoiled"))
    edit_json(spoiled / "transformer" / "config.json", num_attention_heads="four")
    for second, message in (
        (tmp_path / "nothing", "model_index.json is missing"),
        (spoiled, "num_attention_heads is 'four'"),
    ):
        out = tmp_path / "t.csv"
        assert main(["tiny-sd3", str(second), "--sizes", "64", *QUICK, "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("profile_model: ")
        assert message in error
        assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-sd3", "tiny-sd3"], "two MODELs would be named 'tiny-sd3'"),
        (["a/model", "b/model"], "two MODELs would be named 'model'"),
        (["tiny-sd3", "--name", ""], "'' cannot name a model"),
        (["tiny-sd3", "--name", " m"], "' m' cannot name a model"),
        (["tiny-sd3", "--name", "m\n"], "cannot name a model"),
        (["tiny-sd3", "tiny-flux", "--name", "m"], "--name is for one MODEL only"),
        (["tiny-sd3", "--degrees", "2,4"], "with 1 among them"),
        (["tiny-sd3", "--degrees", "1,3"], "must be powers of two"),
        (["tiny-sd3", "--degrees", "0,1"], "'0' is not a whole number above 0"),
        (["tiny-sd3", "--steps-per-point", "0"], "'0' is not a whole number above 0"),
        (["tiny-sd3", "--passes", "0"], "'0' is not a whole number above 0"),
        (["tiny-sd3", "--sizes", "64x"], "'' is not a whole number above 0"),
        (["tiny-sd3", "--sizes", "65552"], "65552 has a side above 65536"),
        (["tiny-sd3", "--sizes", "64x64x9x9"], "'64x64x9x9' is no size"),
        (["tiny-sd3", "--batches", "2,4"], "with 1 among them"),
        (["tiny-sd3", "--stages", "encode,draw"], "must be some of encode,diffuse,decode"),
        (["tiny-sd3", "--attention", "fast"], "invalid choice: 'fast'"),
        (["flux.1-dev"], "--random-weights makes the published model of that name"),
        ([], "name at least one MODEL"),
        (["tiny-sd3", "--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["tiny-sd3", "--out", "table"], "'table' must end in .csv"),
        (["tiny-sd3", "--out", "folder.csv"], "'folder.csv' is a directory"),
        (["tiny-sd3", "--out", "file/t.csv"], "the directory of 'file/t.csv' cannot be made"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    main: Main,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.csv").mkdir()
    Path("file").touch()
    with pytest.raises(SystemExit) as stopped:
        main(["--out", "t.csv", *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith("profile_model: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_gpu_that_does_not_exist_is_reported(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tiny-sd3", "--device", "cuda", "--out", str(tmp_path / "t.csv")])
    assert "--device cuda: torch finds no GPU here" in capsys.readouterr().err
