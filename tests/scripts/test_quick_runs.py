"""Every benchmark runs: `--quick` of each, here those without Ray, in `tests/e2e/test_quick_runs.py` the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.quick_runs import ROOT, WITH_RAY, WITHOUT_RAY, read_documented_figures, run_quick

# It runs benchmarks, and is tested with one of its own.
OF_BENCHMARKS = "compare_commits"
# Their quick runs are in `tests/scripts/default_model`.
OF_MODELS = {"judge", "train_default_model"}


@pytest.mark.parametrize("script", WITHOUT_RAY)
def test_quick_run(script: str, tmp_path: Path) -> None:
    run_quick(script, tmp_path)


def test_no_benchmark_is_left_out() -> None:
    scripts = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*.py")}
    named = {name for name in scripts if name.startswith(("bench_", "compare_"))} - {OF_BENCHMARKS}
    assert named <= {*WITH_RAY, *WITHOUT_RAY}
    assert {name for name, source in scripts.items() if "add_quick(" in source} == {*WITH_RAY, *WITHOUT_RAY, *OF_MODELS}


@pytest.mark.parametrize("script", WITH_RAY)
def test_the_figures_are_documented(script: str) -> None:
    assert read_documented_figures(script)


@pytest.mark.parametrize("script", WITH_RAY)
def test_those_that_need_ray_are_run_by_the_tests_that_have_it(script: str) -> None:
    runs = (ROOT / "tests" / "e2e" / "test_quick_runs.py").read_text(encoding="utf-8")
    assert f'run_quick("{script}"' in runs
