"""scripts/gpu_check.py: what it keeps, what it does again, and what it says without a GPU."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.gpu_check.estimates import add_estimates
from lib.gpu_check.jobs import Check, CheckRunner, read_last_line
from lib.measure.models import parse_shapes

from tests.support.waiting import wait_until
from tridentserve.models.kernels import ATTENTIONS

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "gpu_check.py"
LONG_S = 3600.0


def job(name: str, program: str, stage: str = "steps") -> Check:
    return Check(stage, name, (sys.executable, "-c", program), read_last_line)


def count(path: Path, figure: int = 1) -> str:
    """A program that notes that it has run."""
    return f"open({str(path)!r}, 'a').write('x'); print('some text'); print('{{\"figure\": {figure}}}')"


def test_what_is_done_is_kept_and_not_done_again(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    jobs = [job("first", count(runs)), job("second/third", count(runs, 2))]
    assert CheckRunner(out, LONG_S).run(jobs) == []
    again = CheckRunner(out, LONG_S)
    assert again.run(jobs) == []
    assert runs.read_text() == "xx"
    assert {name: result["figures"] for name, result in again.results.items()} == {
        "first": {"figure": 1},
        "second/third": {"figure": 2},
    }
    assert (out / "second-third.log").read_text().startswith("some text\n")


def test_what_failed_is_done_again_and_says_its_last_lines(tmp_path: Path) -> None:
    runner = CheckRunner(tmp_path, LONG_S)
    assert runner.run([job("check", "print('why'); exit(1)")]) == []
    assert runner.results["check"]["status"] == "failed"
    assert runner.results["check"]["figures"] == {"last_lines": ["why"]}
    runner.run([job("check", "print('{}')")])
    assert json.loads((tmp_path / "gpu-check.json").read_text())["check"]["status"] == "done"


def test_what_failed_is_tried_again_after_what_is_left(tmp_path: Path) -> None:
    order = tmp_path / "order"

    def note(name: str, status: int = 0) -> Check:
        return job(name, f"open({str(order)!r}, 'a').write({name!r}); print('{{}}'); exit({status})")

    CheckRunner(tmp_path, LONG_S).run([note("a", 1), note("b")])
    runner = CheckRunner(tmp_path, LONG_S)
    jobs = [note("a"), note("b"), note("c")]
    assert runner.run(jobs) == []
    assert order.read_text() == "ab" + "ca"
    assert runner.list_names(jobs, "done") == ["a", "b", "c"]


def test_what_needs_more_memory_than_there_is_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    large, small = (replace(job(str(gb), count(runs)), need_bytes=gb * 10**9) for gb in (24, 12))
    runner = CheckRunner(tmp_path, LONG_S, memory_bytes=int(22.8e9))
    assert runner.run([large, small]) == []
    assert runs.read_text() == "x"
    kept = json.loads((tmp_path / "gpu-check.json").read_text())["24"]
    assert kept == {
        "stage": "steps",
        "status": "skipped",
        "reason": "needs 24.0 GB, this GPU has 22.8 GB for tensors",
    }
    assert "24: skipped: needs 24.0 GB" in capsys.readouterr().out
    assert (runner.list_names([large, small], "skipped"), runner.list_names([large, small], "failed")) == (["24"], [])
    CheckRunner(tmp_path, LONG_S, memory_bytes=int(45e9)).run([large, small])  # another GPU
    assert runs.read_text() == "xx"


@pytest.mark.parametrize(
    ("total_gb", "skipped"),
    [(24, {"flux.1-dev", "qwen-image", "wan2.1-14b", "hunyuanvideo"}), (48, set()), (80, set())],
)
def test_models_that_a_gpu_does_not_hold_are_known_before(total_gb: int, skipped: set[str], tmp_path: Path) -> None:
    jobs = runpy.run_path(str(SCRIPT))["list_jobs"](tmp_path, "some new GPU")
    models = [each for each in jobs if each.stage in ("steps", "tables")]
    assert all(each.need_bytes for each in models)
    assert {each.name.split()[1] for each in models if each.need_bytes > 0.95e9 * total_gb} == skipped


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_make_takes_the_environment_at_hand() -> None:
    command = ["make", "--no-print-directory", "gpu-check", f"PYTHON={sys.executable}", "BIN=no-such-folder"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "torch finds no GPU here" in json.loads(ended.stdout.splitlines()[-1])["skipped"]


def test_a_check_that_outlasts_the_time_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lib.gpu_check.jobs._LEAST_S", 1.0)
    started = tmp_path / "pid"
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
open({str(started)!r}, "w").write(str(child.pid))
time.sleep(3600)
"""
    runner = CheckRunner(tmp_path / "out", 5.0)
    assert runner.run([job("long", program), job("later", "print('{}')")]) == ["long", "later"]
    assert runner.results["long"]["status"] == "cut short"
    assert "later" not in runner.results
    if started.exists():  # else its interpreter did not come so far, as the machine was busy
        wait_until(lambda: not _is_alive(int(started.read_text())))


def _is_alive(pid: int) -> bool:
    """False for a process that has ended, also while nobody has asked for its status."""
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and bool(command.read_bytes())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_without_a_gpu_it_says_so_and_checks_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "torch finds no GPU here" in json.loads(ended.stdout.splitlines()[-1])["skipped"]
    assert not (tmp_path / "out").exists()


def test_all_stages_have_checks_that_their_scripts_understand(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPT))
    jobs = list(script["list_jobs"](tmp_path, "NVIDIA H100"))
    assert list(dict.fromkeys(each.stage for each in jobs)) == list(script["STAGES"])
    assert len({each.name for each in jobs}) == len(jobs)
    for name in ("compare_kernels", "profile_model"):
        parse = runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))["_parse_arguments"]
        for each in jobs:
            if each.command[1].endswith(f"{name}.py"):
                parsed = parse([*(part if part != "cuda" else "cpu" for part in each.command[2:])])
                if each.name.endswith("eager"):
                    assert parsed.attention == list(ATTENTIONS)


def test_a_report_of_the_tests_is_read(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite tests="2" failures="1" errors="0" skipped="0"><testcase classname="a" name="b"/>'
        '<testcase classname="a" name="c"><failure message="no"/></testcase></testsuite></testsuites>'
    )
    read: Any = runpy.run_path(str(SCRIPT))["read_report"]
    assert read(report) == {
        "tests": 2,
        "failures": 1,
        "errors": 0,
        "skipped": 0,
        "broken": [{"test": "a.c", "said": "no"}],
    }


def test_the_memory_of_steps_stands_beside_what_is_expected() -> None:
    rows: list[dict[str, Any]] = [
        {"attention": "sdpa", "peak_bytes": 93930044},
        {"attention": "math", "peak_bytes": 2 * 93930044},
        {"attention": "cudnn", "error": "a mask"},
    ]
    figures = {"model": "sd3-medium", "sizes": {"512x512": rows, "8192x8192": [{"peak_bytes": 1}]}}
    added = add_estimates(figures, "NVIDIA H200")
    assert added["estimates"]["512x512"] == {"peak_bytes": 93930044, "table": "h200", "device": "NVIDIA H200"}
    assert [row.get("peak_ratio") for row in rows] == [1.0, 2.0, None]
    assert added["estimates"]["8192x8192"] is None
    assert added["sizes"]["8192x8192"] == [{"peak_bytes": 1}]


def test_memory_that_no_table_of_this_gpu_has_is_expected_from_another() -> None:
    figures = {"model": "hunyuanvideo", "sizes": {"960x544x33": [{"peak_bytes": 10**9}]}}
    (estimate,) = add_estimates(figures, "some new GPU")["estimates"].values()
    assert estimate["table"] == "h100"
    assert add_estimates({"model": "unknown", "sizes": {"512x512": []}}, "NVIDIA H200")["estimates"] == {
        "512x512": None
    }


def test_the_steps_that_gpu_check_takes_have_an_estimate() -> None:
    for model, size, _ in runpy.run_path(str(SCRIPT))["_STEPS"]:
        (shape,) = parse_shapes(size)
        (estimate,) = add_estimates({"model": model, "sizes": {str(shape): []}}, "NVIDIA H200")["estimates"].values()
        assert estimate is not None, model
